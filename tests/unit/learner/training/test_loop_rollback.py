"""A run whose rewards collapsed goes back to its last good checkpoint, and on with the next step.

The rewards are 1 in the first ten steps and 0 after them. The mean of ten steps is below half of
the best at step 16. The lag limit is 1, so a checkpoint must be 10 + 1 steps old: that of step 5.
"""

from dataclasses import replace

import pytest

from tests.fixtures.learner.training import CountingUpdate, TrainingFixture
from vcpo.algo.health.early_warning import StepHealth
from vcpo.records.journal import read_events, read_metrics
from vcpo.wire.phase import RunPhase
from vcpo.wire.versions import step_of
from vcpo_learner.update.run_health import RunHealth

GOOD_STEPS, COLLAPSE = 10, 16
FELL = "step 16: the mean reward of 10 steps fell from 1 to 0.4, most at w: 1 to 0.4"


class RewardedUpdate(CountingUpdate):
    """Adds 1 to a parameter in each step, whose reward is that of the policy version."""

    def __init__(self, model, spec, *, rewards):
        super().__init__(model)
        self.health = RunHealth(spec)
        self._weight = next(model.parameters()).detach().view(-1)[0]
        self._start = float(self._weight)
        self._rewards = rewards

    @property
    def value(self):
        return round(float(self._weight) - self._start)

    def finish(self, newest=()):
        self._weight += 1.0
        reward, backoff = (
            self._rewards[step_of(self.pending.policy_version)],
            self.health.backoff.factor,
        )
        self.health._observe(StepHealth(relative_ess=1.0), {"w": [reward] * 8})
        return replace(super().finish(newest), learning_rate_backoff=backoff)


@pytest.fixture
def make_run_of(tmp_path):
    """A learner with these rewards by policy version, and the values that it publishes."""

    def make(rewards, *, health=None, **sections):
        learner = TrainingFixture(
            tmp_path,
            update_of=lambda model, spec: RewardedUpdate(model, spec, rewards=rewards),
            steps=len(rewards),
            health=health or {},
            **({"checkpoint": {"everySteps": 5, "keep": 1}} | sections),
        )
        learner.published = []
        take = learner.published_state.take

        def watched(precision):
            learner.published.append(learner.update.value)
            return take(precision)

        learner.published_state.take = watched
        return learner

    return make


def told(tmp_path, *kinds):
    return [(each.kind, each.message) for each in read_events(tmp_path) if each.kind in kinds]


def rewards_of(*, steps=20):
    """Good, bad until the rollback, and good again."""
    bad = COLLAPSE - GOOD_STEPS
    return [1.0] * GOOD_STEPS + [0.0] * bad + [1.0] * (steps - GOOD_STEPS - bad)


async def test_the_version_after_the_collapse_has_the_parameters_of_the_last_good_checkpoint(
    make_run_of, tmp_path
):
    learner = make_run_of(rewards_of())
    assert await learner.run() is RunPhase.COMPLETE
    assert learner.published == [*range(16), 5, 6, 7, 8, 9]
    steps = read_metrics(tmp_path).steps
    assert [step.step for step in steps] == list(range(1, 21))
    assert [step.rollbacks for step in steps] == [0] * 15 + [1] * 5
    assert [step.learning_rate_backoff for step in steps] == [1.0] * 16 + [0.5] * 4
    rolled_back = (
        f"{FELL}. Model and optimizer are those of step 5 again, the learning rate goes on at"
        " x 0.5, and what older versions sampled is dropped; rollback 1 of at most 2"
    )
    assert told(tmp_path, "RolledBack", "LearningRateLowered") == [
        ("RolledBack", rolled_back),
        ("LearningRateLowered", "Learning rate x 1 -> x 0.5: rollback at step 16."),
    ]


async def test_every_trajectory_is_counted_across_a_rollback_and_none_from_before_it_is_used(
    make_run_of, tmp_path
):
    learner = make_run_of(rewards_of())
    await learner.run()
    counts = learner.dispatcher.ledger.counts()
    counts.check()
    assert counts.consumed == 20 * 4
    limits = {step.step: step.lag_limit_steps for step in read_metrics(tmp_path).steps}
    assert [limits[step] for step in (16, 17, 18)] == [1, 0, 1]


async def test_a_learner_that_restarts_after_a_rollback_goes_on_from_it(make_run_of):
    learner = make_run_of(rewards_of())
    await learner.run(until_step=COLLAPSE)
    later = make_run_of(rewards_of())
    assert later.training.recovery.resume() == COLLAPSE
    assert later.update.value - learner.update.value == 0
    assert later.update.health.rollbacks.number == 1
    assert later.dispatcher.lag_limit_steps == 0
    assert await later.run() is RunPhase.COMPLETE


async def test_a_redo_after_a_rollback_keeps_the_lag_limit_of_the_last_step(make_run_of):
    # Killed in step 19, two versions after the rollback: then the bound of 1 holds again.
    learner, limits = make_run_of(rewards_of()), []
    begin = learner.update.begin

    def die_in_step_19(groups, *, policy_version):
        if step_of(policy_version) == 18:
            raise KeyboardInterrupt
        return begin(groups, policy_version=policy_version)

    learner.update.begin = die_in_step_19
    with pytest.raises(KeyboardInterrupt):
        await learner.run()
    later = make_run_of(rewards_of())
    assert later.training.recovery.resume() == COLLAPSE
    begin_step = later.update.begin

    def watched(groups, *, policy_version):
        limits.append(later.dispatcher.lag_limit_steps)
        return begin_step(groups, policy_version=policy_version)

    later.update.begin = watched
    assert await later.run() is RunPhase.COMPLETE
    assert limits == [1] * 4


async def test_a_rollback_is_saved_at_once(make_run_of, tmp_path):
    learner = make_run_of(rewards_of(), evaluation={"everySteps": 100})
    await learner.run()
    saved = [message for _, message in told(tmp_path, "CheckpointSaved")]
    assert saved == [f"step {step}" for step in (5, 10, 15, 16, 20)]


async def test_a_damaged_checkpoint_is_not_gone_back_to(make_run_of, tmp_path):
    rewards = [1.0] * 20 + [0.0] * 6 + [1.0] * 4  # collapsed at 26: checkpoints up to 15 are old
    learner = make_run_of(rewards, checkpoint={"everySteps": 5, "keep": 9})
    record_step = learner.signals.record_step

    def damaging(record):
        record_step(record)
        if record.step == 25:
            folder = tmp_path / "checkpoints" / "step-00000015"
            (folder / "update.pt").write_bytes(b"damaged")

    learner.signals.record_step = damaging
    await learner.run()
    ((_, message),) = told(tmp_path, "RolledBack")
    assert "are those of step 10 again" in message


async def test_a_run_without_a_good_checkpoint_goes_on_and_says_so_once(make_run_of, tmp_path):
    learner = make_run_of([1.0] * 10 + [0.0] * 10, checkpoint={"everySteps": 100})
    assert await learner.run() is RunPhase.COMPLETE
    assert told(tmp_path, "RolledBack", "NotRolledBack") == [
        (
            "NotRolledBack",
            f"{FELL}; the run goes on as it is: no good checkpoint is at least 11 steps old",
        )
    ]
    counted = learner.gauges.metrics.registry.get_sample_value(
        "vcpo_learner_rollbacks_refused_total", {"run": "run"}
    )
    assert counted == 1
