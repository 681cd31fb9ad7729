"""Log lines and events of a step besides its record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import ManualClock, make_trajectory
from tests.fixtures.records import STEP
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.reasons import SkipReason
from vcpo.records.step_record import StepRecord
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.step_log import LINE_PERIOD_S, StepLog


def step_log(total_steps: int) -> StepLog:
    return StepLog(total_steps, clock=ManualClock())


def told_of(news: StepLog, record: StepRecord, detail: str | None = None, *, backoff: float = 1.0):
    """Kind and message of each event of a step, which leaves a backoff to the next one."""
    return list(news.events(record, detail, next_backoff=backoff))


def events_of(news: StepLog, *, skipped: list[str | None]) -> list[tuple[int, str]]:
    """Step and kind of every event."""
    return [
        (step, kind)
        for step, reason in enumerate(skipped, start=1)
        for kind, _ in told_of(news, replace(STEP, step=step, skipped=reason), None)
    ]


def test_the_first_skipped_steps_are_reported_each_and_more_of_them_as_what_they_mean():
    events = events_of(step_log(2000), skipped=[None, *["no_gradient"] * 1100])
    assert events == [
        (2, "StepSkipped"),
        (3, "StepSkipped"),
        (4, "StepSkipped"),
        (11, "NoUpdate"),
        (101, "NoUpdate"),
        (1001, "NoUpdate"),
    ]


def test_an_update_restarts_the_count():
    events = events_of(step_log(100), skipped=[*["no_gradient"] * 9, None, *["no_gradient"] * 9])
    assert [step for step, _ in events] == [1, 2, 3, 11, 12, 13]


@pytest.mark.parametrize("reason", SkipReason)
def test_a_run_that_makes_no_update_is_reported_why_and_what_to_do(reason):
    news = step_log(100)
    for step in range(1, 11):
        events = dict(told_of(news, replace(STEP, step=step, skipped=reason.value), None))
    assert events["NoUpdate"].startswith("The last 10 steps made no update: ")
    assert "Cure: " in events["NoUpdate"]


def test_the_number_at_fault_is_reported():
    record = replace(STEP, step=4, skipped="low_ess")
    assert dict(told_of(step_log(9), record, "rho .01")) == {
        "StepSkipped": "step 4: the ESS ratio is too small a share of the on-policy ratio (rho .01)"
    }


def test_a_collapse_warning_is_reported_when_it_changes():
    news = step_log(9)
    levels = ["ok", "warn", "warn", "ok"]
    records = [replace(STEP, step=1, warning_level=level, warning_score=0.4) for level in levels]
    assert [dict(told_of(news, record, None)) for record in records] == [
        {},
        {"CollapseWarning": "step 1: warn (score 0.40)"},
        {},
        {"CollapseWarning": "step 1: ok (score 0.40)"},
    ]


def logged_steps(caplog):
    return [record.step for record in caplog.records]


def test_a_fast_run_logs_a_line_every_thirty_seconds_its_first_and_its_last_step(caplog):
    caplog.set_level("INFO")
    clock = ManualClock()
    news = StepLog(100, clock=clock)
    for step in range(1, 101):  # one every 0.9 s
        news.log_if_due(replace(STEP, step=step))
        clock.advance(0.9)
    # 34 steps take 30.6 s, which is the first time that 30 s have passed.
    assert logged_steps(caplog) == [1, 35, 69, 100]


def test_a_slow_run_logs_every_step(caplog):
    caplog.set_level("INFO")
    clock = ManualClock()
    news = StepLog(9, clock=clock)
    for step in range(1, 9):
        news.log_if_due(replace(STEP, step=step))
        clock.advance(LINE_PERIOD_S)
    assert logged_steps(caplog) == list(range(1, 9))


def test_a_logged_step_says_how_the_run_is_doing(caplog):
    caplog.set_level("INFO")
    record = replace(
        STEP,
        step=8,
        reward_mean=0.4312,
        ess_ratio=0.69,
        on_policy_ess_ratio=0.92,
        learning_rate=2.2e-7,
        learning_rate_scale=0.88,
        learning_rate_backoff=0.25,
        lag_mean=2.13,
        lag_max=5,
        tokens_per_s=418.2,
        step_s=3.21,
        idle_s=0.04,
    )
    news = step_log(8)
    news.log_if_due(record)
    news.log_if_due(replace(record, learning_rate=0.0, skipped="no_gradient"))
    start = "step 8/8: reward 0.431, ESS 0.75 of on-policy, lr"
    end = ", lag 2.1 (max 5), 418 tokens/s, 3.2 s after waiting 0.0 s"
    assert caplog.messages == [
        f"{start} 2.2e-07 (ESS x0.88, backoff x0.25){end}",
        f"{start} 0{end}, no update (no_gradient)",
    ]
    fields = vars(caplog.records[0])
    assert fields["relative_ess_ratio"] == pytest.approx(0.75)
    assert (fields["step"], fields["version"], fields["tokens_per_s"]) == (8, 8, 418.2)


def step_of_age(age_steps: int, *, buffered: int = 0) -> StepRecord:
    """Step 40, of batches of 4, with a calibration of some age."""
    return replace(STEP, step=40, consumed=160, buffered=buffered, calibration_age_steps=age_steps)


def test_the_calibration_of_a_run_whose_responses_have_all_arrived_gets_old_without_a_word():
    # 100 steps of 4: 160 consumed and 240 buffered are all of them.
    assert list(told_of(step_log(100), step_of_age(32, buffered=240), None)) == []
    (event,) = told_of(step_log(100), step_of_age(32, buffered=236), None)
    assert event[0] == "CalibrationStale"


def test_a_calibration_that_gets_old_is_reported_once_and_when_it_is_renewed():
    news = step_log(99)
    ages = [31, 32, 33, 0, 1, 32]
    kinds = [[kind for kind, _ in told_of(news, step_of_age(age), None)] for age in ages]
    assert kinds == [[], ["CalibrationStale"], [], ["CalibrationRenewed"], [], ["CalibrationStale"]]


def test_an_old_calibration_is_reported_with_the_ratio_that_stays_and_the_cure():
    record = replace(step_of_age(32), on_policy_ess_ratio=0.875)
    message = dict(told_of(step_log(99), record, None))["CalibrationStale"]
    assert "for 32 steps. The on-policy ESS ratio stays at 0.88" in message
    assert "set algorithm.onPolicyEssRatio" in message


def test_a_lowered_learning_rate_is_reported_once_with_the_warning_that_lowered_it():
    news = step_log(9)
    told = []
    for step, factor in enumerate([1.0, 0.5, 0.5, 0.25], start=1):
        record = replace(
            STEP,
            step=step,
            warning_level="critical",
            warning_score=0.714,
        )
        told += [
            text
            for kind, text in told_of(news, record, backoff=factor)
            if kind == "LearningRateLowered"
        ]
    assert told == [
        "Learning rate x 1 -> x 0.5: early warning critical (score 0.71) at step 2.",
        "Learning rate x 0.5 -> x 0.25: early warning critical (score 0.71) at step 4.",
    ]


def test_a_rate_that_a_rollback_lowered_is_reported_with_the_rollback():
    news = step_log(90)
    told = []
    for step, (factor, rollbacks) in enumerate([(1.0, 0), (0.5, 1), (0.25, 1)], start=1):
        record = replace(
            STEP,
            step=step,
            warning_level="critical",
            warning_score=0.714,
            rollbacks=rollbacks,
        )
        told += [
            text
            for kind, text in told_of(news, record, backoff=factor)
            if kind == "LearningRateLowered"
        ]
    assert told == [
        "Learning rate x 1 -> x 0.5: rollback at step 2.",
        "Learning rate x 0.5 -> x 0.25: early warning critical (score 0.71) at step 3.",
    ]


def test_a_resumed_run_does_not_report_again_what_its_checkpoint_already_had():
    news = step_log(9)
    news.resume(WarningLevel.CRITICAL, rate_factor=0.5, rollbacks=0)
    told = []
    for step, factor in enumerate([0.5, 0.25], start=5):
        record = replace(
            STEP,
            step=step,
            warning_level="critical",
            warning_score=0.714,
        )
        told += told_of(news, record, backoff=factor)
    assert told == [
        (
            "LearningRateLowered",
            "Learning rate x 0.5 -> x 0.25: early warning critical (score 0.71) at step 6.",
        )
    ]


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
    ((kind, message),) = step_log(9).far_rewards(5, groups, (-1000.0, 1000.0))
    assert kind == "RewardsFar"
    assert message.startswith("step 5: 10000 from worker v for prompt 8, far from the rewards")
    assert "environment.maxAbsoluteReward" in message


def test_rewards_within_the_limits_are_not_reported_and_nothing_is_before_there_are_limits():
    log = step_log(9)
    assert not list(log.far_rewards(5, [group_of(-2.0, 2.0)], (-2.0, 2.0)))
    assert not list(log.far_rewards(1, [group_of(1e9)], None))


def test_of_many_far_rewards_four_are_named_and_of_many_steps_few_are_reported():
    log = step_log(2000)
    told = [
        (step, message)
        for step in range(1, 201)
        for _, message in log.far_rewards(step, [group_of(*[7.0] * 9)], (0.0, 1.0))
    ]
    assert [step for step, _ in told] == [1, 2, 3, 10, 100]
    assert all(message.count("7 from worker w") == 4 for _, message in told)
    assert " and 5 more" in told[0][1]
