"""When a run is reconciled next, and which reports of its learner count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.operator.runs import DEFAULTS, KEY, UID, make_run, parent, pod, signals
from vcpo.wire.phase import RunPhase
from vcpo_operator.children import build_children
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.lifecycle import LearnerDrain, LifecyclePhase, RunVerdict
from vcpo_operator.decisions.snapshot import (
    Snapshot,
    judge_run,
    signals_of_this_run,
    signals_period_s,
)
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.observed.status import RunStatus

LEARNER = ObservedState(pods=(pod("demo-learner-0", Role.LEARNER),))
RECORD = RunRecord(
    key=KEY, uid=UID, generation=1, resource_version=1, deleting=False, spec={}, status={}
)


def snapshot(phase: LifecyclePhase, draining: LearnerDrain | None = None, **spec: Any) -> Snapshot:
    status = RunStatus(start_s=0.0, admission_s=0.0, first_step_s=1.0)
    return Snapshot(
        record=RECORD,
        run=make_run(**spec),
        before=status,
        current=status,
        observed=ObservedState(),
        signals=None,
        verdict=RunVerdict(phase=phase),
        draining=draining,
        is_new_attempt=False,
        now_s=0.0,
    )


def test_a_run_at_rest_is_reconciled_every_minute():
    assert snapshot(LifecyclePhase.SUSPEND).requeue_after_s(0.0) == 60.0


def test_an_active_run_is_reconciled_once_a_poll_period():
    assert snapshot(LifecyclePhase.RUN, control={"pollSeconds": 7.0}).requeue_after_s(0.0) == 7.0


def test_a_deadline_is_met_to_the_moment():
    run = snapshot(LifecyclePhase.RUN, activeDeadlineSeconds=100, control={"pollSeconds": 7.0})
    assert run.requeue_after_s(99.5) == 0.5


def test_a_learner_that_starts_is_reconciled_every_second():
    waiting = LearnerDrain(reason="because", since_s=0.0, until_s=120.0)
    assert snapshot(LifecyclePhase.SUSPEND, waiting).requeue_after_s(10.0) == 1.0


def test_the_end_of_the_wait_is_met_to_the_moment():
    waiting = LearnerDrain(reason="because", since_s=0.0, until_s=120.0)
    assert snapshot(LifecyclePhase.SUSPEND, waiting).requeue_after_s(119.75) == 0.25


def test_a_learner_that_is_to_end_is_asked_at_every_reconciliation():
    assert signals_period_s(make_run(suspend=True), RunStatus()) == 0.0
    assert signals_period_s(make_run(), RunStatus(completion_s=5.0)) == 0.0


def test_a_learner_that_trains_is_asked_now_and_then():
    assert signals_period_s(make_run(control={"pollSeconds": 7.0}), RunStatus()) == 7.0


def test_what_was_said_before_the_start_does_not_count():
    before = RunStatus(start_s=90.0)
    assert signals_of_this_run(signals().at_age(11.0), before, LEARNER, now_s=100.0) is None
    assert signals_of_this_run(signals().at_age(10.0), before, LEARNER, now_s=100.0) is not None


def test_what_is_said_while_the_learner_is_waited_for_counts():
    waiting = RunStatus(drain_s=95.0)
    assert signals_of_this_run(signals().at_age(11.0), waiting, LEARNER, now_s=100.0) is not None


def test_the_failure_of_a_learner_that_is_on_its_way_out_is_that_of_an_attempt_before():
    failed = signals(phase=RunPhase.FAILED)
    leaving = ObservedState(pods=(pod("demo-learner-0", Role.LEARNER, terminating=True),))
    assert signals_of_this_run(failed, RunStatus(start_s=90.0), leaving, now_s=100.0) is None
    assert signals_of_this_run(failed, RunStatus(start_s=90.0), LEARNER, now_s=100.0) is failed
    assert signals_of_this_run(signals(), RunStatus(start_s=90.0), leaving, now_s=100.0) is not None


def test_a_failure_counts_when_it_is_heard_and_not_when_it_is_remembered():
    failed = signals(phase=RunPhase.FAILED)
    started = RunStatus(start_s=90.0)
    assert signals_of_this_run(failed, started, LEARNER, now_s=100.0) is failed
    assert signals_of_this_run(failed.at_age(1.0), started, LEARNER, now_s=100.0) is None
    assert signals_of_this_run(signals().at_age(1.0), started, LEARNER, now_s=100.0) is not None


@pytest.mark.parametrize(
    ("step", "phase"), [(9, LifecyclePhase.RUN), (10, LifecyclePhase.COMPLETE)]
)
def test_a_learner_of_an_older_template_is_complete_if_it_took_the_steps_of_the_run(step, phase):
    built = build_children(parent(), DEFAULTS)
    older = pod("demo-learner-0", Role.LEARNER, template_digest="older", terminating=True)
    judged = judge_run(
        RECORD,
        make_run(),
        before=RunStatus(start_s=0.0),
        observed=ObservedState(pods=(older,)),
        signals=signals(phase=RunPhase.COMPLETE, step=step),
        now_s=100.0,
        kept=Revision.of(parent(), built),
    )
    assert judged.verdict.phase is phase
