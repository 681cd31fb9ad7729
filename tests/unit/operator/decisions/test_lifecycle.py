"""When a run ends, is suspended or continues, and when it is reconciled next."""

from __future__ import annotations

import pytest

from tests.fixtures.operator.runs import make_run, signals
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.lifecycle import (
    LifecyclePhase,
    RunVerdict,
    is_past_time_to_live,
    judge,
    next_phase_change_s,
    starts_new_attempt,
)
from vcpo_operator.observed.status import RunStatus, StatusCondition

START_S = 1_000.0


def started_status(**changes: object) -> RunStatus:
    return RunStatus(
        **{"start_s": START_S, "admission_s": START_S, "first_step_s": START_S + 10, **changes}
    )


def ended_status(kind: str) -> RunStatus:
    condition = StatusCondition(
        type=kind, status="True", reason="Because", message="It did.", transition_s=1.0
    )
    return started_status(conditions=(condition,), completion_s=2_000.0)


def verdict_of(
    status: RunStatus, now_s: float, learner=None, **spec: object
) -> tuple[LifecyclePhase, str]:
    verdict = judge(make_run(**spec).spec, status, learner, now_s)
    return verdict.phase, verdict.reason


def test_a_run_runs():
    assert verdict_of(started_status(), START_S + 20, signals()) == (LifecyclePhase.RUN, "")


def test_a_suspended_run_rests():
    assert verdict_of(started_status(), START_S, suspend=True)[0] is LifecyclePhase.SUSPEND


def test_a_learner_that_is_done_completes_the_run():
    done = signals(phase=RunPhase.COMPLETE)
    assert verdict_of(started_status(), START_S, done) == (LifecyclePhase.COMPLETE, "Succeeded")


def test_a_run_that_never_updated_is_no_plain_success():
    done = signals(phase=RunPhase.COMPLETE, step=10, skipped="low_ess", skipped_steps=10)
    verdict = judge(make_run().spec, started_status(), done, START_S)
    assert (verdict.phase, verdict.reason) == (LifecyclePhase.COMPLETE, "WithoutUpdate")
    assert "All 10 steps are taken. No step made an update (10 of 10" in verdict.message


def test_a_run_that_collapsed_is_complete_for_that_reason():
    done = signals(phase=RunPhase.COMPLETE, collapse="The run collapsed: it fell.")
    verdict = judge(make_run().spec, started_status(), done, START_S)
    assert (verdict.phase, verdict.reason) == (LifecyclePhase.COMPLETE, "Collapsed")
    assert verdict.message == "All 10 steps are taken. The run collapsed: it fell."


def test_a_learner_that_gives_up_fails_the_run():
    failed = signals(phase=RunPhase.FAILED)
    assert verdict_of(started_status(), START_S, failed) == (LifecyclePhase.FAILED, "LearnerFailed")


def test_a_failed_learner_s_own_sentence_is_the_message():
    failed = signals(phase=RunPhase.FAILED, failure="32 generations in a row failed.")
    verdict = judge(make_run().spec, started_status(), failed, START_S)
    assert verdict.message == "32 generations in a row failed."


@pytest.mark.parametrize(
    ("generation", "spec", "expected"),
    [(3, {}, True), (2, {}, False), (3, {"suspend": True}, False)],
    ids=["an edit", "none", "a suspension"],
)
def test_an_edit_of_a_failed_run_tries_it_again(
    generation: int, spec: dict[str, object], expected: bool
):
    status = ended_status("Failed").but(observed_generation=2)
    assert starts_new_attempt(make_run(**spec).spec, status, generation) is expected


def test_a_complete_run_is_not_tried_again():
    status = ended_status("Complete").but(observed_generation=2)
    assert not starts_new_attempt(make_run().spec, status, 3)


@pytest.mark.parametrize(
    ("kind", "phase"), [("Complete", LifecyclePhase.COMPLETE), ("Failed", "failed")]
)
def test_an_end_that_was_written_down_is_for_ever(kind: str, phase: LifecyclePhase):
    assert verdict_of(ended_status(kind), 9_999.0, signals(), suspend=True)[0] == phase


def test_the_next_reconciliation_is_at_the_first_deadline():
    spec = make_run(activeDeadlineSeconds=500, startupDeadlineSeconds=100).spec
    running = RunVerdict(phase=LifecyclePhase.RUN)
    assert next_phase_change_s(spec, started_status(first_step_s=None), running) == START_S + 100
    assert next_phase_change_s(spec, started_status(), running) == START_S + 500
    waiting = started_status(admission_s=None)
    assert next_phase_change_s(spec, waiting, running) is None
    patient = make_run(pendingDeadlineSeconds=90).spec
    assert next_phase_change_s(patient, waiting, running) == START_S + 90


def test_a_resting_run_has_no_deadline():
    spec = make_run(activeDeadlineSeconds=500, suspend=True).spec
    assert (
        next_phase_change_s(spec, started_status(), RunVerdict(phase=LifecyclePhase.SUSPEND))
        is None
    )


def test_an_ended_run_lives_as_long_as_it_is_given():
    spec = make_run(ttlSecondsAfterFinished=60).spec
    status = ended_status("Complete")
    assert not is_past_time_to_live(spec, status, 2_059.0)
    assert is_past_time_to_live(spec, status, 2_060.0)
    assert next_phase_change_s(spec, status, RunVerdict(phase=LifecyclePhase.COMPLETE)) == 2_060.0


def test_an_ended_run_without_a_time_to_live_stays():
    assert not is_past_time_to_live(make_run().spec, ended_status("Complete"), 1e12)
