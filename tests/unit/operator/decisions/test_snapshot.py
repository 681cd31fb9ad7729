"""When a run is looked at again, and which of its learner's words count."""

from __future__ import annotations

from typing import Any

from tests.fixtures.operator.runs import KEY, UID, make_run, pod, report
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.draining import Draining
from vcpo_operator.decisions.lifecycle import Course, Verdict
from vcpo_operator.decisions.snapshot import Look, ask_period_s, believed
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import Role
from vcpo_operator.observed.records import Observed, RunRecord

LEARNER = Observed(pods=(pod("demo-learner-0", Role.LEARNER),))
RECORD = RunRecord(
    key=KEY, uid=UID, generation=1, resource_version=1, deleting=False, spec={}, status={}
)


def look(course: Course, draining: Draining | None = None, **spec: Any) -> Look:
    status = RunStatus(start_s=0.0, admission_s=0.0, first_step_s=1.0)
    return Look(
        record=RECORD,
        run=make_run(**spec),
        before=status,
        current=status,
        observed=Observed(),
        report=None,
        verdict=Verdict(course=course),
        draining=draining,
        is_new_attempt=False,
        now_s=0.0,
    )


def test_a_run_at_rest_is_looked_at_every_minute():
    assert look(Course.SUSPEND).wake_in_s(0.0) == 60.0


def test_a_run_that_runs_is_looked_at_as_often_as_its_signals_are_wanted():
    assert look(Course.RUN, control={"pollSeconds": 7.0}).wake_in_s(0.0) == 7.0


def test_a_deadline_is_met_to_the_moment():
    run = look(Course.RUN, activeDeadlineSeconds=100, control={"pollSeconds": 7.0})
    assert run.wake_in_s(99.5) == 0.5


def test_a_learner_that_is_waited_for_is_looked_at_every_second():
    waiting = Draining(reason="because", since_s=0.0, until_s=120.0)
    assert look(Course.SUSPEND, waiting).wake_in_s(10.0) == 1.0


def test_the_end_of_the_wait_is_met_to_the_moment():
    waiting = Draining(reason="because", since_s=0.0, until_s=120.0)
    assert look(Course.SUSPEND, waiting).wake_in_s(119.75) == 0.25


def test_a_learner_that_is_to_end_is_asked_at_every_look():
    assert ask_period_s(make_run(suspend=True), RunStatus()) == 0.0
    assert ask_period_s(make_run(), RunStatus(completion_s=5.0)) == 0.0


def test_a_learner_that_trains_is_asked_now_and_then():
    assert ask_period_s(make_run(control={"pollSeconds": 7.0}), RunStatus()) == 7.0


def test_what_was_said_before_the_start_does_not_count():
    before = RunStatus(start_s=90.0)
    assert believed(report().aged(11.0), before, LEARNER, now_s=100.0) is None
    assert believed(report().aged(10.0), before, LEARNER, now_s=100.0) is not None


def test_what_is_said_while_the_learner_is_waited_for_counts():
    waiting = RunStatus(drain_s=95.0)
    assert believed(report().aged(11.0), waiting, LEARNER, now_s=100.0) is not None


def test_the_failure_of_a_learner_that_is_on_its_way_out_is_that_of_an_attempt_before():
    failed = report(phase=RunPhase.FAILED)
    leaving = Observed(pods=(pod("demo-learner-0", Role.LEARNER, leaving=True),))
    assert believed(failed, RunStatus(start_s=90.0), leaving, now_s=100.0) is None
    assert believed(failed, RunStatus(start_s=90.0), LEARNER, now_s=100.0) is failed
    assert believed(report(), RunStatus(start_s=90.0), leaving, now_s=100.0) is not None


def test_a_failure_counts_when_it_is_heard_and_not_when_it_is_remembered():
    failed = report(phase=RunPhase.FAILED)
    started = RunStatus(start_s=90.0)
    assert believed(failed, started, LEARNER, now_s=100.0) is failed
    assert believed(failed.aged(1.0), started, LEARNER, now_s=100.0) is None
    assert believed(report().aged(1.0), started, LEARNER, now_s=100.0) is not None
