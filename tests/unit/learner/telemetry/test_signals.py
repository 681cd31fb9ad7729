import pytest

from tests.fixtures.learner.dispatcher import dispatcher_fixture, work_request
from tests.fixtures.records import step_record
from vcpo.learner_control import run_signals
from vcpo.records.reasons import DropReason, SetAsideCause
from vcpo.wire.v1 import work_pb2


@pytest.fixture
def fixture():
    return dispatcher_fixture()


@pytest.fixture
def signals(fixture):
    return fixture.signal_window()


async def submit_groups(fixture, count):
    leases = await fixture.dispatcher.lease(work_request(room=2 * count), wait_s=0)
    for lease in leases:
        fixture.submit(lease, versions=(0, 0, 0))


async def test_rates_are_totals_over_time(signals, fixture):
    await submit_groups(fixture, 2)
    fixture.clock.advance(8.0)
    message = signals.message()
    assert signals.tokens_per_s() == 12 / 8
    assert message.consumed_per_s == 0.0
    fixture.ledger.take_batch(step=0, max_policy_lag_steps=1)
    assert signals.message().consumed_per_s == 4 / 8


async def test_rates_forget_what_was_before_the_window(signals, fixture):
    await submit_groups(fixture, 2)
    for step in range(1, 12):
        fixture.clock.advance(1.0)
        signals.record_step(step_record(step=step))
    assert signals.tokens_per_s() == 0.0


async def test_what_a_throttle_drops_was_produced_all_the_same(signals, fixture):
    await submit_groups(fixture, 2)
    fixture.clock.advance(8.0)
    fixture.ledger.take_batch(step=1, max_policy_lag_steps=2, lag_limit_steps=0)
    assert fixture.ledger.counts().dropped == {DropReason.THROTTLED: 4}
    assert signals.tokens_per_s() == 12 / 8


async def test_totals_restored_from_a_checkpoint_are_not_a_burst_of_production(signals, fixture):
    await submit_groups(fixture, 2)
    signals.resume([])
    fixture.clock.advance(1.0)
    assert signals.tokens_per_s() == 0.0


def test_the_idle_ratio_is_waiting_over_waiting_and_working(signals):
    signals.record_step(step_record(idle_s=1.0, step_s=3.0))
    signals.record_step(step_record(idle_s=2.0, step_s=2.0))
    assert signals.idle_ratio() == 3 / 8


def test_a_learner_that_starves_shows_it_before_its_next_step(signals, fixture):
    signals.record_step(step_record(idle_s=0.0, step_s=4.0))
    signals.start_waiting()
    fixture.clock.advance(12.0)
    assert signals.idle_ratio() == 12 / 16


def test_a_finished_step_counts_once(signals, fixture):
    signals.start_waiting()
    fixture.clock.advance(1.0)
    signals.start_working()
    fixture.clock.advance(3.0)
    signals.record_step(step_record(idle_s=1.0, step_s=3.0))
    fixture.clock.advance(100.0)
    assert signals.idle_ratio() == 1 / 4


def test_silence_is_counted_from_the_last_step(signals, fixture):
    fixture.clock.advance(5.0)
    assert signals.message().since_step_s == 5.0
    signals.record_step(step_record())
    fixture.clock.advance(2.0)
    assert signals.message().since_step_s == 2.0


async def test_workers_are_reported_with_their_leases(signals, fixture):
    await fixture.dispatcher.lease(work_request(worker_id="one", room=2), wait_s=0)
    fixture.clock.advance(3.0)
    (worker,) = signals.message().workers
    assert (worker.worker_id, worker.rollout_group) == ("one", "main")
    assert (worker.silent_s, worker.in_flight) == (3.0, 2)


def test_phase_limit_and_accuracy_are_reported(signals, fixture):
    fixture.dispatcher.drain()
    fixture.dispatcher.throttle(0)
    signals.accuracy = 0.25
    message = signals.message()
    assert (message.phase, message.lag_limit_steps) == (work_pb2.RUN_PHASE_DRAINING, 0)
    assert message.accuracy == 0.25


def test_a_step_is_reported_when_its_numbers_are_and_not_when_its_version_is(signals, fixture):
    fixture.dispatcher.advance_version()
    assert (step_of(signals), signals.message().policy_version) == (0, 1)
    signals.record_step(step_record(step=1))
    fixture.dispatcher.advance_version()
    assert (step_of(signals), signals.message().policy_version) == (1, 2)


def step_of(signals):
    return run_signals(signals.message()).step


def test_workers_that_were_just_set_aside_are_counted_and_the_latest_is_named(fixture, signals):
    assert signals.message().set_aside == ""
    fixture.dispatcher.set_aside("old", SetAsideCause.FAILING, "it fails")
    assert signals.message().set_aside == "A worker was set aside, old (failing): it fails."
    fixture.clock.advance(5.0)
    fixture.dispatcher.set_aside("new", SetAsideCause.MISMATCH, "0.4 nats off")
    told = signals.message().set_aside
    assert told.startswith("2 workers were set aside in the last 10 minutes")
    assert told.endswith("new (mismatch): 0.4 nats off.")
    fixture.clock.advance(600.0)
    assert signals.message().set_aside == ""
