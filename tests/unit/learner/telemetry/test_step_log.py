"""Log lines and events of a step besides its record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import ManualClock, make_trajectory
from tests.fixtures.records import STEP
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.step_record import StepRecord
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.step_log import StepLog

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
    ((kind, message),) = step_log(9).far_rewards(5, groups, (-1000.0, 1000.0))
    assert kind == "RewardsFar"
    assert "10000 from worker v for prompt 8" in message


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
