import math
from collections import Counter

import pytest

from tests.fixtures.learner.dispatcher import dispatcher_fixture, work_request
from tests.fixtures.records import evaluation_record, step_record
from vcpo.metrics import LearnerMetrics
from vcpo.metrics.label_values import Stage, WeightForm
from vcpo.metrics.step_gauges import GAUGES
from vcpo.wire.phase import RunPhase
from vcpo_learner.ledger.workers import WORKER_LOST_AFTER_S
from vcpo_learner.telemetry.gauges import LearnerGauges


@pytest.fixture
def fixture():
    return dispatcher_fixture()


@pytest.fixture
def gauges(fixture):
    signals = fixture.signal_window()
    return LearnerGauges(LearnerMetrics(run="run"), dispatcher=fixture.dispatcher, signals=signals)


def value(gauges, name, **labels):
    return gauges.metrics.registry.get_sample_value(name, {"run": "run", **labels})


async def test_counters_follow_the_ledger(gauges, fixture):
    first, *_ = await fixture.dispatcher.lease(work_request(), wait_s=0)
    fixture.submit(first)
    fixture.dispatcher.release("w", [])
    for _ in range(2):  # refreshing again must not count again
        gauges.refresh()
    assert value(gauges, "vcpo_trajectories_leased_total") == 8
    assert value(gauges, "vcpo_trajectories_buffered") == 2
    assert value(gauges, "vcpo_trajectories_dropped_total", reason="released") == 6


async def test_what_a_ledger_counted_before_a_restart_is_not_counted_again(gauges, fixture):
    await fixture.dispatcher.lease(work_request(), wait_s=0)
    gauges.skip_counted()
    gauges.refresh()
    assert value(gauges, "vcpo_trajectories_leased_total") == 0


async def test_a_rollout_group_whose_workers_are_gone_shows_zero(gauges, fixture):
    await fixture.dispatcher.lease(work_request(), wait_s=0)
    gauges.refresh()
    assert value(gauges, "vcpo_workers", group="main") == 1
    fixture.clock.advance(WORKER_LOST_AFTER_S + 1)
    gauges.refresh()
    assert value(gauges, "vcpo_workers", group="main") == 0


async def test_lag_is_observed_for_every_trajectory_at_the_version_it_was_trained_on(
    gauges, fixture
):
    fixture.dispatcher.policy_version = 1
    first, second, *_ = await fixture.dispatcher.lease(work_request(held=0), wait_s=0)
    fixture.submit(first, versions=(0, 1))
    fixture.submit(second, versions=(1, 1))
    groups = await fixture.dispatcher.next_batch()
    gauges.record_step(step_record(step=2), groups)
    assert value(gauges, "vcpo_policy_lag_steps_count") == 4
    assert value(gauges, "vcpo_policy_lag_steps_sum") == 2


def histogram(gauges, name):
    """Observations by bucket's upper bound, of the buckets that are not empty."""
    family = next(each for each in gauges.metrics.registry.collect() if each.name == name)
    cumulative = [each for each in family.samples if each.name.endswith("_bucket")]
    below, found = 0.0, {}
    for sample in cumulative:
        if sample.value > below:
            found[float(sample.labels["le"])] = sample.value - below
        below = sample.value
    return found


async def test_trajectories_are_counted_by_weight_and_reward(gauges, fixture):
    for given in await fixture.dispatcher.lease(work_request(room=4), wait_s=0):
        fixture.submit(given, versions=(0, 0, 0))
    groups = await fixture.dispatcher.next_batch()
    gauges.record_step(step_record(), groups, (0.0, -0.3, 9.0, -math.inf))
    assert histogram(gauges, "vcpo_log_importance_weight_nats") == {
        -8.0: 1,
        -0.1: 1,
        0.1: 1,
        math.inf: 1,
    }
    trajectories = [one for group in groups for one in group.trajectories]
    rewards = Counter(one.reward for one in trajectories)
    assert histogram(gauges, "vcpo_reward") == rewards


def test_the_time_of_a_step_and_its_number_are_shown_together(gauges):
    assert value(gauges, "vcpo_learner_step_timestamp_seconds") is None
    record = step_record(time_unix_s=1700.0)
    gauges._signals.record_step(record)
    gauges.record_step(record, [])
    assert value(gauges, "vcpo_learner_step") == record.step
    assert value(gauges, "vcpo_learner_step_timestamp_seconds") == 1700.0


def test_a_resumed_learner_does_not_look_stalled(gauges):
    gauges.record_resume(now_unix_s=9000.0, saved_unix_s=100.0)
    assert value(gauges, "vcpo_learner_step_timestamp_seconds") == 9000.0
    assert value(gauges, "vcpo_learner_checkpoint_timestamp_seconds") == 100.0


def stages(gauges):
    """Seconds of the last step by stage, without those of no time."""
    shown = {
        stage: value(gauges, "vcpo_learner_step_stage_seconds", stage=stage) for stage in Stage
    }
    return {stage: duration_s for stage, duration_s in shown.items() if duration_s}


def test_the_stages_of_a_step_are_those_since_the_step_before(gauges, fixture):
    signals = gauges._signals
    for waited_s, worked_s in ((4.0, 3.0), (1.0, 2.0)):
        signals.start_waiting()
        fixture.clock.advance(waited_s)
        gauges.refresh()
        signals.start_working()
        gauges.add_stage(Stage.BACKWARD, worked_s)
        gauges.add_stage(Stage.BACKWARD, worked_s)
        signals.record_step(step_record())
        gauges.record_step(step_record(), [])
        assert stages(gauges) == {Stage.WAIT: waited_s, Stage.BACKWARD: 2 * worked_s}
    gauges.add_stage(Stage.CHECKPOINT, 5.0)
    gauges.refresh()
    assert Stage.CHECKPOINT not in stages(gauges)
    gauges.record_step(step_record(), [])
    assert stages(gauges) == {Stage.CHECKPOINT: 5.0}


def test_served_weights_are_counted_once_by_form(gauges):
    gauges.count_served_weights({WeightForm.FULL: 100})
    gauges.count_served_weights({WeightForm.FULL: 100, WeightForm.DELTA: 7})
    assert value(gauges, "vcpo_weights_served_bytes_total", form="full") == 100
    assert value(gauges, "vcpo_weights_served_bytes_total", form="delta") == 7


def test_every_gauge_that_the_step_record_declares_holds_its_number(gauges):
    numbers = {}
    for number, gauge in enumerate(GAUGES, start=1):
        if gauge.key:
            numbers.setdefault(gauge.field, {})[gauge.key] = number
        else:
            numbers[gauge.field] = number
    gauges.record_step(step_record(**numbers), [])
    shown = [value(gauges, gauge.name) for gauge in GAUGES]
    assert shown == list(range(1, len(GAUGES) + 1))


def test_each_part_of_the_last_steps_reward_is_shown_and_no_other(gauges):
    gauges.record_step(step_record(reward_parts={"exact": 0.25, "form.short": 0.05}), [])
    assert value(gauges, "vcpo_reward_part", part="form.short") == 0.05
    gauges.record_step(step_record(step=2, reward_parts={"exact": 0.5}), [])
    assert value(gauges, "vcpo_reward_part", part="exact") == 0.5
    assert value(gauges, "vcpo_reward_part", part="form.short") is None


def test_a_number_of_an_earlier_step_is_not_shown_as_the_last_ones(gauges):
    gauges.record_step(
        step_record(diagnostics={"token_ess_ratio": 0.5}, ess_by_lag={"0": 0.9, "2": 0.4}), []
    )
    gauges.record_step(
        step_record(step=2, diagnostics={"token_ess_ratio": None}, ess_by_lag={"1": 0.8}), []
    )
    assert value(gauges, "vcpo_token_ess_ratio") is None
    shown = gauges.metrics.lag_ess_ratio.collect()[0].samples
    assert {sample.labels["lag"]: sample.value for sample in shown} == {"1": 0.8}


def test_exactly_the_phase_of_the_run_is_one(gauges, fixture):
    fixture.dispatcher.drain()
    gauges.refresh()
    shown = {phase: value(gauges, "vcpo_learner_phase", phase=phase.value) for phase in RunPhase}
    assert [phase for phase, each in shown.items() if each == 1] == [RunPhase.DRAINING]
    assert set(shown.values()) == {0, 1}


def test_low_evaluations_are_counted_from_those_before_a_restart(gauges):
    before = {100: 0.43, 80: 0.41, 60: 0.72, 0: 0.35}  # as a checkpoint has them: in no order
    record = evaluation_record(step=120, accuracy=0.4, num_prompts=256)
    assert value(gauges, "vcpo_low_evaluations_in_a_row") == 0
    gauges.record_evaluation(record, {**before, 120: 0.4})
    assert value(gauges, "vcpo_low_evaluations_in_a_row") == 3


async def test_invented_groups_do_not_become_labels_without_end(gauges, fixture):
    for number in range(100):
        fixture.registry.record_request(f"w{number}", f"group-{number}", 0)
    gauges.refresh()
    samples = gauges.metrics.workers.collect()[0].samples
    assert len(samples) == 16


def test_a_scrape_beside_a_step_never_has_the_new_step_with_old_numbers(gauges):
    """A scrape reads one gauge after the other, in another thread than the one that sets them."""
    names = [family.name for family in gauges.metrics.registry.collect()]
    assert names.index("vcpo_learner_step") < names.index("vcpo_ess_mean_ratio")
    shown = []
    gauges.metrics.step.set = lambda step: shown.append(
        (step, value(gauges, "vcpo_ess_mean_ratio"))
    )
    for step, ratio in ((1, 0.5), (2, 0.25)):
        record = step_record(step=step, ess_ratio_mean=ratio)
        gauges._signals.record_step(record)
        gauges.record_step(record, [])
    assert shown == [(1, 0.5), (2, 0.25)]
