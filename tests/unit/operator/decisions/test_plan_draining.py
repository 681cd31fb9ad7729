"""Plans while a learner drains."""

from __future__ import annotations

from tests.fixtures.operator.runs import names, signals
from tests.unit.operator.decisions.plans import desired_for, plan_names, settled_cluster
from vcpo.control.signals import WorkerSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.actions import ReleaseLeases
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import LifecyclePhase
from vcpo_operator.decisions.plan import on_delete_actions

WAITING = LearnerDrain(reason="because", since_s=0.0, until_s=120.0)
OVER = LearnerDrain(reason="because", since_s=0.0, until_s=None)


def test_nothing_is_taken_away_before_the_learner_has_ended_in_good_order():
    resting = desired_for(LifecyclePhase.SUSPEND, draining=WAITING)
    assert plan_names(resting, settled_cluster(desired_for()), signals=signals()) == [
        "Drain: because"
    ]


def test_a_learner_that_drains_is_not_asked_again():
    resting = desired_for(LifecyclePhase.SUSPEND, draining=WAITING)
    draining = signals(phase=RunPhase.DRAINING)
    assert plan_names(resting, settled_cluster(desired_for()), signals=draining) == []


def test_a_learner_is_asked_to_drain_on_fresh_signals_alone():
    resting = desired_for(LifecyclePhase.SUSPEND, draining=WAITING)
    assert plan_names(resting, settled_cluster(desired_for()), signals=signals().at_age(1.0)) == []


def test_a_draining_learner_does_not_wait_for_workers_that_are_gone():
    workers = {"gone": WorkerSignals(in_flight=3, silent_s=60.0)}
    draining = signals(phase=RunPhase.DRAINING, workers=workers)
    actions = plan_names(
        desired_for(LifecyclePhase.SUSPEND, draining=WAITING),
        settled_cluster(desired_for()),
        signals=draining,
    )
    assert actions == [str(ReleaseLeases(worker="gone"))]


def test_what_was_waited_for_goes_all_at_once():
    actions = plan_names(
        desired_for(LifecyclePhase.SUSPEND, draining=OVER),
        settled_cluster(desired_for()),
        signals=signals(),
    )
    assert actions == ["Apply StatefulSet demo-learner", "Suspend demo-rollout-main 2"]


def test_a_failed_run_is_not_cleaned_up_before_its_learner_has_ended():
    failed = desired_for(LifecyclePhase.FAILED, draining=WAITING)
    assert plan_names(failed, settled_cluster(desired_for()), signals=signals()) == [
        "Drain: because"
    ]


def test_a_run_that_is_deleted_says_so_to_a_learner_that_trains():
    assert names(on_delete_actions(signals())) == ["Drain: the run is deleted"]


def test_a_run_that_is_deleted_says_nothing_to_a_learner_that_drains_or_is_gone():
    assert on_delete_actions(signals(phase=RunPhase.DRAINING)) == ()
    assert on_delete_actions(None) == ()
