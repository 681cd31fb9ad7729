"""Learners that die, and what the learner after them has and does."""

from collections import Counter

import pytest

from tests.fixtures.learner.dispatcher import make_trajectory, work_request
from tests.fixtures.records import step_record
from vcpo.records.journal import METRICS_FILE, Journal, read_events
from vcpo.wire.phase import RunPhase
from vcpo.wire.versions import step_of, version_of
from vcpo_learner.checkpoints.manifest import CheckpointError

OFTEN = {"everySteps": 4, "keep": 2}


class KilledError(BaseException):
    """Stands in for a signal that no process survives: nobody handles it."""


def dies_before(learner, step):
    """Let a learner die in the step after so many."""
    begin = learner.update.begin

    def begin_step(groups, *, policy_version):
        if step_of(policy_version) == step:
            raise KilledError
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_step
    return learner


async def killed(learner):
    with pytest.raises(KilledError):
        await learner.run()


def trained_on(learner):
    """Note the version and the trajectories of every step."""
    steps, begin = [], learner.update.begin

    def begin_step(groups, *, policy_version):
        result = begin(groups, policy_version=policy_version)
        steps.append((policy_version, [one.trajectory_id for group in groups for one in group]))
        return result

    learner.update.begin = begin_step
    return steps


def told(tmp_path, kind):
    return [event.message for event in read_events(tmp_path) if event.kind == kind]


@pytest.mark.parametrize(
    ("kills", "every_steps"), [([0], 50), ([3, 1, 4], 50), ([3, 3], 2), ([4, 4], 1)]
)
async def test_whatever_kills_a_run_each_group_counts_once_and_a_version_names_one_policy(
    make_learner, tmp_path, kills, every_steps
):
    sections = {"steps": 6, "checkpoint": {"everySteps": every_steps, "keep": 50}}
    made, final = Counter(), {}
    for kill in [*kills, None]:
        learner = make_learner(**sections)
        learner.training.recovery.resume()
        steps = trained_on(learner)
        published, publish = made, learner.policies.publish

        def note(prepared, published=published, publish=publish):
            published[prepared.policy_version] += 1
            publish(prepared)

        learner.policies.publish = note
        if kill is None:
            assert await learner.run() is RunPhase.COMPLETE
        else:
            await killed(dies_before(learner, kill))
        saved = max((int(one.name[-8:]) for one in tmp_path.glob("checkpoints/step-*")), default=0)
        final = {at: ids for at, ids in final.items() if at < saved}
        final |= {step_of(version): ids for version, ids in steps}
    assert max(made.values()) == 1
    assert sorted(final) == list(range(6))
    assert Counter(each for ids in final.values() for each in ids).most_common(1)[0][1] == 1
    counts = learner.dispatcher.ledger.counts()
    counts.check()
    assert counts.consumed == 24


async def test_a_log_of_another_spec_is_refused_without_a_checkpoint(make_learner):
    first = dies_before(make_learner(), 1)
    first.training.recovery.require_unused()
    await killed(first)
    other = make_learner(batch={"promptsPerStep": 1, "trajectoriesPerPrompt": 4})
    with pytest.raises(CheckpointError) as caught:
        other.training.recovery.resume()
    assert "redo-log: belongs to a run with another spec" in str(caught.value)
    assert "spec.batch.promptsPerStep: 2 -> 1" in str(caught.value)
    other.log.close()
    later = make_learner()
    later.training.recovery.resume()
    assert later.dispatcher.ledger.counts().buffered >= 4


async def test_nothing_that_was_accepted_is_lost_with_the_learner(make_learner):
    learner = make_learner(algorithm={"maxPolicyLagSteps": 4})
    whole, part = await learner.dispatcher.lease(work_request(room=4), wait_s=0)
    learner.accept(whole)
    learner.dispatcher.submit("w", part.lease_id, [make_trajectory(part.lease_id, 1)])
    await learner.log.wait_until_kept()
    later = make_learner(algorithm={"maxPolicyLagSteps": 4})
    later.training.recovery.resume()
    counts = later.dispatcher.ledger.counts()
    assert (counts.buffered, counts.in_flight, counts.dropped) == (3, 0, {"learner_restarted": 1})


async def test_groups_that_are_incomplete_after_a_restart_are_completed_without_a_lag(make_learner):
    # A batch of 2 x 4, of which 3 + 3 arrived: one more for each group fits, a whole one does not.
    run = {
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 4},
        "algorithm": {"maxPolicyLagSteps": 0},
    }
    learner = make_learner(**run)
    for given in await learner.dispatcher.lease(work_request(room=8), wait_s=0):
        sent = [make_trajectory(given.lease_id, number) for number in range(3)]
        learner.dispatcher.submit("w", given.lease_id, sent)
    await learner.log.wait_until_kept()
    later = make_learner(**run)
    later.training.recovery.resume()
    leased = await later.dispatcher.lease(later.request(room=8), wait_s=0)
    assert [given.num_trajectories for given in leased] == [1, 1]
    for given in leased:
        later.submit(given, versions=(later.dispatcher.policy_version,))
    assert later.dispatcher.ledger.counts().buffered == 8


HARMS = {
    "absent": lambda journal: journal.unlink(),
    "of another run": lambda journal: journal.write_bytes(
        b'{"type":"step","step":4000,"lag_limit_steps":0}\n'
    ),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
async def test_a_harmed_journal_changes_nothing_that_a_resumed_run_trains(
    make_learner, tmp_path, harm
):
    await killed(dies_before(make_learner(steps=5), 3))
    harm(tmp_path / METRICS_FILE)
    later = make_learner(steps=5)
    later.training.recovery.resume()
    assert later.dispatcher.ledger.counts().buffered >= 12
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.steps == [0, 1, 2, 3, 4]


async def test_a_log_reaches_back_to_the_checkpoint_that_a_rollback_may_need(
    make_learner, tmp_path
):
    await killed(dies_before(make_learner(steps=30, checkpoint=OFTEN), 21))
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    # Good and 11 steps old is that of step 4, the next to be is that of step 12, and 20 is newest.
    assert [path.name[-2:] for path in kept] == ["04", "12", "20"]
    (kept[-1] / "update.pt").write_bytes(b"damaged")
    later = make_learner(steps=30, checkpoint=OFTEN)
    assert later.training.recovery.resume() == 12
    counts = later.dispatcher.ledger.counts()
    counts.check()
    assert counts.buffered >= 4 * (21 - 12)
    assert not told(tmp_path, "LogDamaged")
    assert await later.run() is RunPhase.COMPLETE


def value(learner, name):
    learner.gauges.refresh()
    return learner.gauges.metrics.registry.get_sample_value(name, {"run": "run"})


async def test_what_a_log_has_lost_is_told_with_its_number_and_only_once(make_learner, tmp_path):
    dead = make_learner(steps=9, checkpoint=OFTEN)
    await killed(dies_before(dead, 7))
    *_, newest = sorted(tmp_path.glob("redo-log/*.log"))
    newest.unlink()
    later = make_learner(steps=9, checkpoint=OFTEN)
    assert later.training.recovery.resume() == 4
    (message,) = told(tmp_path, "LogDamaged")
    assert "step 7 of metrics.jsonl knows of" in message
    lost = int(message.split(" later ones, which were committed")[0].split()[-1])
    in_the_file = dead.log.position - int(message.split("holds change ")[1].split(";")[0])
    assert 3 <= lost <= in_the_file, "what was in flight is left out"
    assert value(later, "vcpo_learner_lost_changes") == lost
    assert later.signals.message().lost_changes == lost
    assert later.dispatcher.policy_version == version_of(1 + lost, 4), "each may have been a start"
    assert await later.run() is RunPhase.COMPLETE
    last = make_learner(steps=9, checkpoint=OFTEN)
    last.training.recovery.resume()
    assert value(last, "vcpo_learner_lost_changes") == 0
    assert len(told(tmp_path, "LogDamaged")) == 1


async def test_what_was_in_flight_in_the_last_record_is_not_lost(make_learner, tmp_path):
    learner = make_learner()
    await learner.run(until_step=1)
    leased = learner.dispatcher.ledger.counts().leased + 5
    Journal(tmp_path).step(step_record(time_unix_s=4e9, leased=leased, in_flight=5))
    make_learner().training.recovery.resume()
    assert not told(tmp_path, "LogDamaged")


async def test_a_run_whose_checkpoints_are_gone_is_refused_with_the_fix(make_learner, tmp_path):
    await killed(dies_before(make_learner(steps=9, checkpoint=OFTEN | {"keep": 1}), 7))
    for path in sorted(tmp_path.glob("redo-log/*.log"))[:-1]:
        path.unlink()  # as the next checkpoints would
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    later = make_learner(steps=9, checkpoint=OFTEN)
    with pytest.raises(CheckpointError) as caught:
        later.training.recovery.resume()
    assert "checkpoints: holds no checkpoint" in str(caught.value)
    assert "redo-log goes on from one of step 4: put its folder back" in str(caught.value)
    later.log.close()
    # Nothing was changed: with the folder back, the run goes on.
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    last = make_learner(steps=9, checkpoint=OFTEN)
    assert last.training.recovery.resume() == 4
    assert not told(tmp_path, "LogDamaged")
