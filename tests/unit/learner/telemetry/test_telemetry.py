"""Steps in a row in trouble: begun, counted on, and ended."""

from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_trajectory,
    work_request,
)
from tests.fixtures.operator.prometheus import SCRAPED_S, answer, scrape
from tests.fixtures.records import STEP, step_record
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import parse_run
from vcpo.learner_control import run_signals
from vcpo.metrics import LearnerMetrics
from vcpo.records.journal import Metrics
from vcpo.records.reasons import DropReason, SetAsideCause
from vcpo.records.step_record import StepRecord
from vcpo.report.recorded_run import recorded_signals
from vcpo.wire.v1 import work_pb2
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.step_log import StepLog, far_rewards, streak_fields, window_fields
from vcpo_operator.observed.status import Numbers
from vcpo_operator.signals.prometheus import parse_answer

WELL = {"level": WarningLevel.OK, "has_collapsed": False, "skipped": None, "lag_limit_steps": 8}


def streaks(before=None, **changes):
    return streak_fields(before, **{**WELL, "max_policy_lag_steps": 8, **changes})


def test_a_run_that_is_well_counts_nothing():
    before = step_record(critical_steps=4, collapsed_steps=3, throttled_steps=9, skipped_steps=2)
    assert set(streaks(before).values()) == {0}
    assert set(streaks().values()) == {0}


@pytest.mark.parametrize(
    ("field", "trouble"),
    [
        ("critical_steps", {"level": WarningLevel.CRITICAL}),
        ("critical_steps", {"level": WarningLevel.DEAD}),
        ("collapsed_steps", {"has_collapsed": True}),
        ("throttled_steps", {"lag_limit_steps": 4}),
        ("skipped_steps", {"skipped": "low_ess"}),
    ],
)
def test_a_step_in_trouble_is_the_first_or_one_more(field, trouble):
    assert streaks(**trouble)[field] == 1
    before = step_record(**{"lag_limit_steps": 4, field: 6})
    assert streaks(before, **trouble)[field] == 7


def test_a_limit_that_rises_is_a_recovery():
    before = step_record(lag_limit_steps=3, throttled_steps=30)
    assert streaks(before, lag_limit_steps=4)["throttled_steps"] == 0
    assert streaks(before, lag_limit_steps=2)["throttled_steps"] == 31


def test_a_step_usually_takes_the_mean_of_the_last_ones_with_their_waits():
    last = [step_record(step_s=2.0, idle_s=1.0), step_record(step_s=4.0, idle_s=0.0)]
    taken = window_fields(last, ess_ratio=0.5, step_s=4.0, idle_s=1.0)
    assert taken["step_interval_s"] == (3.0 + 4.0 + 5.0) / 3
    first = window_fields([], ess_ratio=0.5, step_s=900.0, idle_s=60.0)
    assert first["step_interval_s"] == 960.0


def test_the_ess_ratio_is_a_mean_and_a_low_tenth_of_ten_steps_that_have_one():
    def means(*ratios):
        found = window_fields(
            [step_record(ess_ratio=ratio) for ratio in ratios[:-1]],
            ess_ratio=ratios[-1],
            step_s=1.0,
            idle_s=0.0,
        )
        return found["ess_ratio_mean"], found["ess_ratio_low"]

    assert means(0.5, 0.1, 0.9, 0.7) == (pytest.approx(0.55), 0.1)
    assert means(0.01, *[0.5] * 10) == (0.5, 0.5)
    assert means(0.0, 0.5, 0.0) == (0.5, 0.5)
    assert means(0.0) == (None, None)


RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 3, optimizer: {learningRate: 1e-3}}
""")
NAMES = ("rate", "schedule", "scale", "backoff")


@pytest.fixture
def steps():
    """Two steps of a warm-up of four, the second one at a quarter."""
    rates = {"learning_rate": 1.2e-4, "learning_rate_scale": 0.96, "learning_rate_backoff": 0.25}
    return [
        step_record(step=1, learning_rate=2.5e-4, learning_rate_schedule=0.25),
        step_record(step=2, learning_rate_schedule=0.5, **rates),
    ]


@pytest.fixture
def learner(steps):
    """What the learner tells after the steps: its message, and its metrics by name."""
    fixture = dispatcher_fixture()
    window = fixture.signal_window()
    metrics = LearnerMetrics(run="r")
    gauges = LearnerGauges(metrics, dispatcher=fixture.dispatcher, signals=window)
    for step in steps:
        window.record_step(step)
        gauges.record_step(step, [])
    scraped = {each.name: each.value for one in metrics.registry.collect() for each in one.samples}
    return window.message(), scraped


def numbers(rate):
    return [getattr(rate, name) for name in NAMES]


def test_a_step_that_was_skipped_has_no_rate(steps):
    assert replace(steps[1], skipped="no_gradient").effective_rate is None


def test_metrics_signals_records_and_status_have_the_same_four_numbers(steps, learner):
    expected, (message, scraped) = numbers(steps[1].effective_rate), learner
    names = ["", "_schedule_ratio", "_scale_ratio", "_backoff_ratio"]
    metrics = {f"vcpo_learning_rate{name}": scraped[f"vcpo_learning_rate{name}"] for name in names}
    assert list(metrics.values()) == expected
    _, answered = parse_answer(answer(scrape(**metrics)), now_s=SCRAPED_S)
    signals = run_signals(message)
    recorded = recorded_signals(RUN, Metrics(steps=tuple(steps), evaluations=()), 0.0)
    for found in (signals, answered, recorded):
        assert numbers(found.effective_rate) == expected
    status = Numbers.of(signals).model_dump(by_alias=True)["learningRate"]
    assert list(status.values()) == pytest.approx(expected, rel=1e-3)
    assert list(status) == ["effective", *NAMES[1:]]


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


CRITICAL = replace(STEP, warning_level="critical", warning_score=0.714)


def step_log(total_steps: int) -> StepLog:
    return StepLog(total_steps, clock=ManualClock())


def told_of(news: StepLog, record: StepRecord, detail: str | None = None, *, backoff: float = 1.0):
    """Kind and message of each event of a step, which leaves a backoff to the next one."""
    return list(news.events(record, detail, next_backoff=backoff))


def test_the_first_skipped_steps_are_reported_each_and_more_of_them_as_what_they_mean():
    news, events = step_log(2000), []
    for number in range(1, 1101):
        record = replace(STEP, step=number, skipped="no_gradient", skipped_steps=number)
        events += [(number, kind) for kind, _ in told_of(news, record)]
    assert events == [
        (1, "StepSkipped"),
        (2, "StepSkipped"),
        (3, "StepSkipped"),
        (10, "NoUpdate"),
        (100, "NoUpdate"),
        (1000, "NoUpdate"),
    ]


def test_a_collapse_warning_is_reported_when_it_changes():
    news = step_log(9)
    records = [replace(STEP, warning_level=each) for each in ("ok", "warn", "warn", "ok")]
    told = [[kind for kind, _ in told_of(news, record)] for record in records]
    assert told == [[], ["CollapseWarning"], [], ["CollapseWarning"]]


def test_a_fast_run_logs_a_line_every_thirty_seconds_its_first_and_its_last_step(caplog):
    caplog.set_level("INFO")
    clock = ManualClock()
    news = StepLog(100, clock=clock)
    for step in range(1, 101):  # one every 0.9 s
        news.log_if_due(replace(STEP, step=step))
        clock.advance(0.9)
    # 34 steps take 30.6 s, which is the first time that 30 s have passed.
    assert [record.step for record in caplog.records] == [1, 35, 69, 100]


def test_a_logged_step_has_its_numbers_as_fields(caplog):
    caplog.set_level("INFO")
    record = replace(STEP, step=8, ess_ratio=0.69, on_policy_ess_ratio=0.92, tokens_per_s=418.2)
    step_log(8).log_if_due(replace(record, skipped="no_gradient"))
    fields = vars(caplog.records[0])
    assert fields["relative_ess_ratio"] == pytest.approx(0.75)
    assert (fields["step"], fields["tokens_per_s"], fields["skipped"]) == (8, 418.2, "no_gradient")
    assert caplog.messages[0].endswith("no update (no_gradient)")


def step_of_age(age_steps: int, *, buffered: int = 0) -> StepRecord:
    """Step 40, of batches of 4, with a calibration of some age."""
    return replace(STEP, step=40, consumed=160, buffered=buffered, calibration_age_steps=age_steps)


def test_the_calibration_of_a_run_whose_responses_have_all_arrived_gets_old_without_a_word():
    # 100 steps of 4: 160 consumed and 240 buffered are all of them.
    assert told_of(step_log(100), step_of_age(32, buffered=240)) == []
    (event,) = told_of(step_log(100), step_of_age(32, buffered=236))
    assert event[0] == "CalibrationStale"


def test_a_calibration_that_gets_old_is_reported_once_and_when_it_is_renewed():
    news = step_log(99)
    ages = [31, 32, 33, 0, 1, 32]
    kinds = [[kind for kind, _ in told_of(news, step_of_age(age))] for age in ages]
    assert kinds == [[], ["CalibrationStale"], [], ["CalibrationRenewed"], [], ["CalibrationStale"]]


def lowered(news: StepLog, *steps: tuple[float, int]) -> list[str]:
    """What is told of critical steps: the backoff that each leaves, and rollbacks so far."""
    return [
        text
        for step, (factor, rollbacks) in enumerate(steps, start=1)
        for kind, text in told_of(
            news, replace(CRITICAL, step=step, rollbacks=rollbacks), backoff=factor
        )
        if kind == "LearningRateLowered"
    ]


def test_a_lowered_learning_rate_is_reported_once_with_the_warning_or_rollback_that_lowered_it():
    told = lowered(step_log(90), (1.0, 0), (0.5, 1), (0.5, 1), (0.25, 1))
    assert told == [
        "Learning rate x 1 -> x 0.5: rollback at step 2.",
        "Learning rate x 0.5 -> x 0.25: early warning critical (score 0.71) at step 4.",
    ]


def test_a_resumed_run_does_not_report_again_what_its_checkpoint_already_had():
    news = step_log(9)
    news.resume(WarningLevel.CRITICAL, rate_factor=0.5, rollbacks=0)
    assert told_of(news, CRITICAL, backoff=0.5) == []


def group_of(*rewards, worker="w", prompt_index=3):
    trajectories = [make_trajectory("l", at, reward=one) for at, one in enumerate(rewards)]
    return Lease(
        grant_number=1,
        group_number=1,
        lease_id="l",
        worker_id=worker,
        prompt_index=prompt_index,
        accepted=dict(enumerate(trajectories)),
    )


def test_a_far_reward_is_reported_with_its_worker_and_its_prompt():
    groups = [group_of(1.0, 0.0), group_of(0.0, 1e4, worker="v", prompt_index=8)]
    message = far_rewards(5, groups, (-1000.0, 1000.0))
    assert "10000 from worker v for prompt 8" in message
    assert "They are 25.0% of the step's, and 1 are of v." in message


def test_rewards_within_the_limits_are_not_reported_and_nothing_is_before_there_are_limits():
    assert far_rewards(5, [group_of(-2.0, 2.0)], (-2.0, 2.0)) is None
    assert far_rewards(1, [group_of(1e9)], None) is None


def test_of_many_far_rewards_four_are_named():
    assert far_rewards(8, [group_of(*[7.0] * 9)], (0.0, 1.0)).count("7 from worker w") == 4
