import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import dispatcher_fixture, work_request
from tests.fixtures.records import evaluation_record, step_record
from vcpo.control.signals import WINDOW_STEPS
from vcpo.control.throttle import ThrottleState, ess_health, next_throttle
from vcpo.learner_control import run_signals
from vcpo.records.reasons import DropReason, SetAsideCause
from vcpo.wire.v1 import work_pb2
from vcpo_learner.telemetry.signals import SignalWindow


@pytest.fixture
def fixture():
    return dispatcher_fixture()


@pytest.fixture
def signals(fixture):
    return signal_window(fixture)


def signal_window(fixture):
    return SignalWindow(
        run_name="run",
        total_steps=3,
        batch_trajectories=4,
        dispatcher=fixture.dispatcher,
        clock=fixture.clock,
    )


async def submit_groups(fixture, count):
    leases = await fixture.dispatcher.lease(work_request(room=2 * count), wait_s=0)
    for lease in leases:
        fixture.submit(lease, versions=(0, 0, 0))


def test_before_the_first_step_what_is_unknown_is_absent(signals):
    message = signals.message()
    unknown = ["ess_ratio", "ess_ratio_mean", "ess_ratio_low", "learning_rate_scale"]
    unknown += ["warning_score", "warning_level", "lag_mean", "lag_p50", "lag_max", "reward_mean"]
    assert not any(message.HasField(name) for name in unknown)


def test_the_ess_ratio_is_reported_as_last_mean_and_low(signals):
    for step, ratio in enumerate([0.5, 0.1, 0.9, 0.7], start=1):
        signals.record_step(step_record(step=step, ess_ratio=ratio))
    message = signals.message()
    assert message.ess_ratio == 0.7
    assert message.ess_ratio_mean == pytest.approx(0.55)
    assert message.ess_ratio_low == 0.1


def test_the_early_warning_is_that_of_the_last_step(signals):
    signals.record_step(step_record(warning_level="critical", warning_score=0.75))
    signals.record_step(step_record(warning_level="warn", warning_score=0.4))
    message = signals.message()
    assert (message.warning_level, message.warning_score) == ("warn", 0.4)


def test_the_window_holds_the_last_ten_steps(signals):
    signals.record_step(step_record(step=1, ess_ratio=0.01, reward_mean=100.0))
    for step in range(2, 12):
        signals.record_step(step_record(step=step, ess_ratio=0.5, reward_mean=0.25))
    message = signals.message()
    assert (message.ess_ratio_low, message.reward_mean) == (0.5, 0.25)


def test_a_step_whose_weights_have_no_value_says_nothing_of_the_ess(signals):
    signals.record_step(
        step_record(ess_ratio=0.0, learning_rate_scale=0.0, skipped="non_finite_weight")
    )
    message = signals.message()
    assert not message.HasField("ess_ratio")
    assert not message.HasField("learning_rate_scale")


def test_lag_is_that_of_the_last_step(signals):
    signals.record_step(step_record(lag_mean=9.0, lag_p50=9, lag_max=9))
    signals.record_step(step_record(lag_mean=0.5, lag_p50=0, lag_max=2))
    message = signals.message()
    assert (message.lag_mean, message.lag_p50, message.lag_max) == (0.5, 0, 2)


async def test_rates_are_totals_over_time(signals, fixture):
    await submit_groups(fixture, 2)
    fixture.clock.advance(8.0)
    message = signals.message()
    assert message.generated_tokens_per_second == 12 / 8
    assert message.consumed_trajectories_per_second == 0.0
    fixture.ledger.take_batch(step=0, max_policy_lag_steps=1)
    assert signals.message().consumed_trajectories_per_second == 4 / 8


async def test_rates_forget_what_was_before_the_window(signals, fixture):
    await submit_groups(fixture, 2)
    for step in range(1, 12):
        fixture.clock.advance(1.0)
        signals.record_step(step_record(step=step))
    assert signals.message().generated_tokens_per_second == 0.0


async def test_what_a_throttle_drops_was_produced_all_the_same(signals, fixture):
    await submit_groups(fixture, 2)
    fixture.clock.advance(8.0)
    fixture.ledger.take_batch(step=1, max_policy_lag_steps=2, lag_limit_steps=0)
    assert fixture.ledger.counts().dropped == {DropReason.THROTTLED: 4}
    assert signals.message().generated_tokens_per_second == 12 / 8


async def test_totals_restored_from_a_checkpoint_are_not_a_burst_of_production(signals, fixture):
    await submit_groups(fixture, 2)
    signals.resume([])
    fixture.clock.advance(1.0)
    assert signals.message().generated_tokens_per_second == 0.0


def test_the_idle_ratio_is_waiting_over_waiting_and_working(signals):
    signals.record_step(step_record(idle_s=1.0, step_s=3.0))
    signals.record_step(step_record(idle_s=2.0, step_s=2.0))
    assert signals.idle_ratio() == 3 / 8


def test_a_learner_that_starves_shows_it_before_its_next_step(signals, fixture):
    signals.record_step(step_record(idle_s=0.0, step_s=4.0))
    signals.start_waiting()
    fixture.clock.advance(12.0)
    assert signals.idle_ratio() == 12 / 16


def test_a_long_update_is_not_waiting(signals, fixture):
    signals.start_waiting()
    fixture.clock.advance(1.0)
    signals.start_working()
    fixture.clock.advance(9.0)
    assert signals.idle_ratio() == 1 / 10


def test_a_finished_step_counts_once(signals, fixture):
    signals.start_waiting()
    fixture.clock.advance(1.0)
    signals.start_working()
    fixture.clock.advance(3.0)
    signals.record_step(step_record(idle_s=1.0, step_s=3.0))
    fixture.clock.advance(100.0)
    assert signals.idle_ratio() == 1 / 4


def test_nothing_done_yet_is_not_idle(signals):
    assert signals.idle_ratio() == 0.0


def test_silence_is_counted_from_the_last_step(signals, fixture):
    fixture.clock.advance(5.0)
    assert signals.message().seconds_since_step == 5.0
    signals.record_step(step_record())
    fixture.clock.advance(2.0)
    assert signals.message().seconds_since_step == 2.0


async def test_workers_are_reported_with_their_held_version_and_leases(signals, fixture):
    await fixture.dispatcher.lease(work_request(worker_id="one", room=2), wait_s=0)
    fixture.clock.advance(3.0)
    (worker,) = signals.message().workers
    assert (worker.worker_id, worker.rollout_group, worker.policy_version) == ("one", "main", 0)
    assert (worker.seconds_since_seen, worker.in_flight_trajectories) == (3.0, 2)


def test_phase_limit_and_evaluations_are_reported(signals, fixture):
    fixture.dispatcher.drain()
    fixture.dispatcher.throttle(0)
    signals.record_evaluation(evaluation_record(step=0, accuracy=0.25))
    message = signals.message()
    assert (message.phase, message.lag_limit_steps) == (work_pb2.RUN_PHASE_DRAINING, 0)
    assert [(one.step, one.accuracy) for one in message.evaluations] == [(0, 0.25)]


def test_why_a_run_was_given_up_is_reported(signals, fixture):
    assert signals.message().failure == ""
    fixture.dispatcher.abort()
    signals.record_failure("32 generations in a row failed.")
    assert signals.message().failure == "32 generations in a row failed."


def test_steps_without_an_update_are_counted_in_a_row(signals):
    for skipped in ("low_ess", None, "no_gradient", "no_gradient"):
        signals.record_step(step_record(skipped=skipped))
    message = signals.message()
    assert (message.skipped_steps_in_a_row, message.skip_reason) == (2, "no_gradient")
    signals.record_step(step_record())
    assert (signals.message().skipped_steps_in_a_row, signals.message().skip_reason) == (0, "")


def test_steps_that_were_skipped_before_a_resume_count_with_those_after_it(signals):
    signals.resume([step_record(step=1), *(step_record(step=n, skipped="low_ess") for n in (2, 3))])
    message = signals.message()
    assert (message.skipped_steps_in_a_row, message.skip_reason) == (2, "low_ess")
    signals.record_step(step_record(step=4, skipped="no_gradient"))
    message = signals.message()
    assert (message.skipped_steps_in_a_row, message.skip_reason) == (3, "no_gradient")


def test_a_step_is_reported_when_its_numbers_are_and_not_when_its_version_is(signals, fixture):
    fixture.dispatcher.advance_version()
    assert (signals.message().step, signals.message().policy_version) == (0, 1)
    signals.record_step(step_record(step=1))
    fixture.dispatcher.advance_version()
    assert (signals.message().step, signals.message().policy_version) == (1, 2)


def test_a_resumed_run_is_at_the_step_of_its_checkpoint(signals, fixture):
    fixture.dispatcher.policy_version = 7
    signals.resume([step_record(step=6)])
    assert signals.message().step == 7


FLOOR = 0.2


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0.01, 0.1, 0.3, 0.9]), st.booleans(), st.booleans()),
        max_size=40,
    )
)
def test_every_window_below_the_floor_that_a_poll_saw_halves_the_lag_limit(steps):
    """Of each step: its ESS ratio, and whether a poll comes before and after its record."""
    fixture = dispatcher_fixture()
    window, throttle = signal_window(fixture), ThrottleState(lag_limit_steps=64)
    seen, halved = 0, -WINDOW_STEPS - 1
    for step, (ratio, *polls) in enumerate(steps, 1):
        fixture.dispatcher.advance_version()
        for recorded, is_polled in zip((step - 1, step), polls, strict=True):
            if recorded == step:
                window.record_step(step_record(step=step, ess_ratio=ratio))
            if not is_polled or recorded == seen:
                continue
            before, throttle, seen = throttle, after_poll(throttle, window), recorded
            ratios = [each[0] for each in steps[max(0, recorded - WINDOW_STEPS) : recorded]]
            if sum(ratios) / len(ratios) < FLOOR and recorded - halved > WINDOW_STEPS:
                assert throttle.lag_limit_steps == before.lag_limit_steps // 2
                halved = recorded


def after_poll(throttle, window):
    seen = run_signals(window.message())
    return next_throttle(
        throttle, health=ess_health(FLOOR, seen), step=seen.step, max_policy_lag_steps=64
    )


def test_a_skipped_step_leaves_the_scale_of_the_last_step_that_was_taken(signals):
    skipped = {"skipped": "no_gradient", "learning_rate_scale": 0.0}
    signals.record_step(step_record(step=1, **skipped))
    assert not signals.message().HasField("learning_rate_scale")
    signals.record_step(step_record(step=2, learning_rate_scale=0.75))
    signals.record_step(step_record(step=3, **skipped))
    message = signals.message()
    assert message.learning_rate_scale == 0.75
    assert message.skipped_steps_in_a_row == 1


def test_workers_that_were_set_aside_are_named_the_latest_first(fixture, signals):
    fixture.dispatcher.set_aside("old", SetAsideCause.FAILING, "it fails")
    fixture.clock.advance(5.0)
    fixture.dispatcher.set_aside("new", SetAsideCause.MISMATCH, "0.4 nats off")
    told = [
        (one.worker_id, one.cause, one.message, one.seconds_since)
        for one in signals.message().set_aside
    ]
    assert told == [("new", "mismatch", "0.4 nats off", 0.0), ("old", "failing", "it fails", 5.0)]
