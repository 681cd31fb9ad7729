"""Conditions: what each says in each case."""

import dataclasses
from typing import Any

import pytest

from tests.fixtures.operator.runs import make_run, pod, signals
from vcpo.control.conditions import Condition
from vcpo.control.decision import ControlState, decide
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo_operator.children import Kind
from vcpo_operator.decisions.conditions import (
    ConditionInputs,
    condition_states,
    decide_no_update,
    invalid_spec_conditions,
    merge_conditions,
)
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.names import Role
from vcpo_operator.observed.pod_causes import lost_node_cause
from vcpo_operator.observed.records import Cause, ObservedChild, ObservedGroup, ObservedState
from vcpo_operator.observed.status import RunStatus

LEARNER = pod("demo-learner-0", Role.LEARNER)
WORKER = pod("demo-rollout-main-x")


def conditions_for(
    *pods: Any, phase: LifecyclePhase = LifecyclePhase.RUN, **changes: Any
) -> dict[str, Condition]:
    inputs = ConditionInputs(
        **{
            "spec": make_run(**changes.pop("spec", {})).spec,
            "verdict": RunVerdict(phase=phase, reason="Because", message="It did."),
            "observed": ObservedState(pods=pods),
            "decision": None,
            "has_stepped": True,
            **changes,
        }
    )
    return {each.type: each for each in condition_states(inputs)}


def brief(finding: Condition) -> tuple[str, str]:
    return finding.status, finding.reason


def test_every_condition_is_said_from_the_first_visit_on():
    assert list(conditions_for()) == [
        "Accepted",
        "LearnerReady",
        "RolloutsReady",
        "SignalsFresh",
        "EssHealthy",
        "LearnerFed",
        "Stable",
        "Suspended",
        "Ready",
        "Complete",
        "Failed",
    ]


def test_a_departure_from_the_spec_is_said_where_the_spec_is_accepted():
    accepted = conditions_for(note="The run gets no PodMonitor.")["Accepted"]
    assert accepted.status == "True"
    assert accepted.message == "The spec is valid. The run gets no PodMonitor."


def test_a_learner_whose_log_was_damaged_says_how_much_is_lost_and_does_not_forget_it():
    lost = conditions_for(LEARNER, WORKER, signals=signals(lost_changes=154))["LearnerReady"]
    assert brief(lost) == ("True", "LogDamaged")
    assert "154 committed changes were missing in its redo log" in lost.message
    before = RunStatus(conditions=merge_conditions([lost], RunStatus(), generation=1, now_s=0.0))
    later = conditions_for(LEARNER, WORKER, keeps_last_known_signals=True, before=before)
    assert later["LearnerReady"] == lost
    whole = conditions_for(LEARNER, WORKER, signals=signals(), before=before)
    assert brief(whole["LearnerReady"]) == ("True", "PodReady")


def test_a_pod_on_its_way_out_counts_for_nothing():
    leaving = pod("demo-learner-0", Role.LEARNER, terminating=True)
    assert brief(conditions_for(leaving)["LearnerReady"]) == ("False", "PodPending")


def test_steps_are_taken_with_workers_that_the_learner_hears_of_whatever_their_probes_say():
    starting = pod("demo-rollout-main-x", ready=False)
    learner = pod("demo-learner-0", Role.LEARNER, ready=False)
    workers = {starting.name: WorkerSignals(in_flight=1, silent_s=0.5)}
    conditions = conditions_for(learner, starting, signals=signals(workers=workers))
    assert brief(conditions["LearnerReady"]) == ("True", "PodReady")
    assert brief(conditions["RolloutsReady"]) == ("True", "MinimumAvailable")


@pytest.mark.parametrize(
    ("silent_s", "age_s"), [(16.0, 0.0), (10.0, 6.0)], ids=["the worker", "the learner"]
)
def test_who_was_not_heard_of_lately_waits_for_its_probe(silent_s: float, age_s: float):
    starting = pod("demo-rollout-main-x", ready=False)
    workers = {starting.name: WorkerSignals(in_flight=1, silent_s=silent_s)}
    heard = signals(workers=workers).at_age(age_s)
    ready = conditions_for(LEARNER, starting, signals=heard)["RolloutsReady"]
    assert brief(ready)[1] == "BelowMinimum"


def test_a_learner_that_did_not_answer_waits_for_its_probe():
    learner = pod("demo-learner-0", Role.LEARNER, ready=False)
    silent = dataclasses.replace(signals(), is_silent=True)
    assert brief(conditions_for(learner, signals=silent)["LearnerReady"]) == ("False", "PodPending")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"termination_deadline_s": 100.0}, "NodeLost"),
        ({"termination_deadline_s": 171.0}, "PodPending"),
        ({"termination_deadline_s": None}, "PodPending"),
        (
            {"termination_deadline_s": 200.0, "cause": lost_node_cause("demo-learner-0", "n")},
            "NodeLost",
        ),
    ],
    ids=["overdue", "in time", "held by a finalizer", "said by the control plane"],
)
def test_a_learner_s_pod_that_cannot_end_has_lost_its_node(changes: Any, reason: str):
    stuck = pod("demo-learner-0", Role.LEARNER, terminating=True, ready=False, **changes)
    assert brief(conditions_for(stuck, now_s=200.0)["LearnerReady"]) == ("False", reason)


def test_the_pod_s_trouble_is_the_condition_s_reason():
    cause = Cause(reason="ImagePullBackOff", message="pod p: no such image")
    broken = pod("demo-rollout-main-x", ready=False, cause=cause)
    condition = conditions_for(LEARNER, broken)["RolloutsReady"]
    assert brief(condition) == ("False", "ImagePullBackOff")
    assert condition.message == "pod p: no such image"


def test_fewer_workers_than_the_least_are_not_enough():
    spec = {"rollouts": [{"name": "main", "minReplicas": 2, "maxReplicas": 2}]}
    assert brief(conditions_for(LEARNER, WORKER, spec=spec)["RolloutsReady"]) == (
        "False",
        "BelowMinimum",
    )


def test_workers_above_the_minimum_that_cannot_be_created_are_reported_and_no_error():
    record = ObservedChild(
        kind=Kind.DEPLOYMENT, name="d", uid="u", owner_uid=None, digest=None, version=1
    )
    cause = Cause(reason="FailedCreate", message="Deployment d: exceeded quota")
    group = ObservedGroup(child=record, group="main", replicas=3, ready=1, cause=cause)
    observed = ObservedState(pods=(LEARNER, WORKER), groups={"main": group})
    condition = conditions_for(observed=observed)["RolloutsReady"]
    assert brief(condition) == ("True", "PartiallyAvailable")
    assert condition.message.endswith("More cannot be created: Deployment d: exceeded quota")


def test_one_bad_worker_among_enough_good_ones_is_no_trouble():
    broken = pod("bad", ready=False, cause=Cause(reason="OOMKilled", message="m"))
    assert conditions_for(LEARNER, WORKER, broken)["RolloutsReady"].status == "True"


@pytest.mark.parametrize(("has_stepped", "reason"), [(False, "Initializing"), (True, "Degraded")])
def test_what_is_missing_is_a_start_before_the_first_step_and_a_fault_after(
    has_stepped: bool, reason: str
):
    ready = conditions_for(LEARNER, has_stepped=has_stepped)["Ready"]
    assert brief(ready) == ("False", reason)
    assert ready.message.startswith("RolloutsReady (BelowMinimum)")


def training(says: RunSignals, **changes: Any) -> Condition:
    """`Ready` of a run whose parts are all well."""
    spec = make_run().spec
    decision, _ = decide(spec, ControlState.start(spec, now_s=0.0), says, 1.0)
    return conditions_for(LEARNER, WORKER, signals=says, decision=decision, **changes)["Ready"]


def test_a_nearly_solved_task_is_without_an_update_until_updates_are_the_rule_again():
    said, before, told = None, RunStatus(), []
    for step, skipped in ((40, 12), (41, 0), (55, 9), (62, 11), (91, 0), (92, 0)):
        says = signals(step=step, skipped="low_ess" if skipped else None, skipped_steps=skipped)
        said = decide_no_update(says, 1000, before, said)
        ready = training(says, no_update=said)
        told.append(ready.reason)
        conditions = merge_conditions([ready], before, generation=1, now_s=0.0)
        before = RunStatus(conditions=conditions)
        if step == 41:
            said = None  # the operator starts anew
            assert "12 steps made no update" in ready.message
    assert told == ["NoUpdate"] * 5 + ["Training"]


@pytest.mark.parametrize(("now_s", "is_told"), [(114.0, False), (115.0, True)])
def test_a_failure_to_reach_a_learner_counts_once_it_has_been_ready_for_a_moment(now_s, is_told):
    spec = make_run().spec
    decision, _ = decide(spec, ControlState.start(spec, now_s=0.0), None, 1.0)
    ready = conditions_for(LEARNER)["LearnerReady"]
    before = RunStatus(conditions=merge_conditions([ready], RunStatus(), generation=1, now_s=100.0))
    known = {"decision": decision, "silence": Cause(reason="Unreachable", message="no answer")}
    found = conditions_for(LEARNER, **known, before=before, now_s=now_s)["SignalsFresh"]
    assert (found.reason == "Unreachable") is is_told
    assert conditions_for(LEARNER, **known, now_s=now_s)["SignalsFresh"].reason == "Missing"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"created_s": 91.0}, "PodPending"),
        ({"created_s": 90.0}, "Unschedulable"),
        ({"created_s": 91.0, "node": "n"}, "Unschedulable"),
    ],
)
def test_a_new_pod_whose_volume_is_being_made_is_no_trouble(changes: Any, reason: str):
    cause = Cause(reason="Unschedulable", message="unbound immediate PersistentVolumeClaims")
    new = pod("demo-learner-0", Role.LEARNER, ready=False, cause=cause, **changes)
    assert conditions_for(new, now_s=100.0)["LearnerReady"].reason == reason


def test_a_run_whose_learner_set_workers_aside_names_the_last_one_and_stays_ready():
    differs = signals(mismatch="They differ.", set_aside="A worker was set aside, w (mismatch).")
    apart = training(differs)
    assert (brief(apart), apart.message) == (("True", "EnginesDisagree"), "They differ.")
    says = signals(set_aside="A worker was set aside, w (failing): it fails.")
    ready = training(says)
    assert (brief(ready), ready.message) == (("True", "WorkersSetAside"), says.set_aside)


@pytest.mark.parametrize(("failures", "reason"), [(31, "Training"), (32, "GenerationFailing")])
def test_an_environment_that_breaks_in_a_run_is_named(failures: int, reason: str):
    why = "reward: KeyError: 'answer' (/app/task.py:12)"
    ready = training(signals(failures_in_a_row=failures, generation_failure=why))
    assert ready.reason == reason
    assert (ready.message == why) == (reason == "GenerationFailing")


def test_a_refused_write_is_said_before_all_else():
    refused = Conflict(reason="ApplyFailed", message="422: no")
    ready = conditions_for(LEARNER, WORKER, conflict=refused)["Ready"]
    assert (brief(ready), ready.message) == (("False", "ApplyFailed"), "422: no")


@pytest.mark.parametrize(
    ("pods", "status", "reason"),
    [((LEARNER,), "False", "SuspendInProgress"), ((), "True", "Suspended")],
)
def test_a_rest_begins_when_the_last_pod_is_gone(pods: Any, status: str, reason: str):
    assert brief(conditions_for(*pods, phase=LifecyclePhase.SUSPEND)["Suspended"]) == (
        status,
        reason,
    )


def test_a_complete_run_is_ready_and_complete():
    conditions = conditions_for(phase=LifecyclePhase.COMPLETE)
    assert brief(conditions["Ready"]) == ("True", "Complete")
    assert brief(conditions["Complete"]) == ("True", "Because")
    assert brief(conditions["Failed"]) == ("False", "NotFailed")


def test_a_failed_run_says_why_in_its_conditions():
    conditions = conditions_for(phase=LifecyclePhase.FAILED)
    assert brief(conditions["Ready"]) == ("False", "Because")
    assert conditions["Failed"].message == "It did."


def test_a_refused_spec_leaves_the_other_conditions_alone():
    first = merge_conditions(conditions_for().values(), RunStatus(), generation=1, now_s=5.0)
    second = merge_conditions(
        invalid_spec_conditions("bad"), RunStatus(conditions=first), generation=2, now_s=9.0
    )
    kept = {each.type: each for each in second}
    assert (kept["Accepted"].status, kept["Accepted"].reason) == ("False", "InvalidSpec")
    assert kept["Complete"] in first


def test_the_transition_time_moves_with_the_status_only():
    found = Condition(type="A", status="False", reason="X", message="m")
    first = merge_conditions([found], RunStatus(), generation=1, now_s=5.0)
    again = Condition(type="A", status="False", reason="Y", message="n")
    (same,) = merge_conditions([again], RunStatus(conditions=first), generation=2, now_s=9.0)
    assert (same.transition_s, same.reason, same.observed_generation) == (5.0, "Y", 2)
    turned = Condition(type="A", status="True", reason="Z", message="n")
    (moved,) = merge_conditions([turned], RunStatus(conditions=first), generation=2, now_s=9.0)
    assert moved.transition_s == 9.0


def test_a_message_fits_the_schema():
    long = Condition(type="A", status="True", reason="X", message="m" * 5_000)
    (condition,) = merge_conditions([long], RunStatus(), generation=1, now_s=1.0)
    assert len(condition.message) == 1024


def test_a_worker_that_was_put_out_counts_after_the_one_in_its_place():
    old = Cause(reason="Evicted", message="pod a: the node was low on memory")
    new = Cause(reason="Unschedulable", message="pod b: no node")
    pods = (pod("a", ready=False, is_finished=True, cause=old), pod("b", ready=False, cause=new))
    assert conditions_for(LEARNER, pods[0])["RolloutsReady"].reason == "Evicted"
    assert conditions_for(LEARNER, *pods)["RolloutsReady"].reason == "Unschedulable"


def test_a_run_without_a_step_says_what_fails_in_its_place():
    why = "reward: KeyError: 'answer' (task.py:7)"
    failing = signals(failures_in_a_row=12, generation_failure=why)
    ready = conditions_for(LEARNER, WORKER, signals=failing, has_stepped=False)["Ready"]
    assert brief(ready) == ("False", "Initializing")
    assert ready.message.endswith(f"12 generations in a row have failed; the latest: {why}")


@pytest.mark.parametrize(
    ("pending", "found"), [("", ("True", "Current")), ("They stay.", ("False", "RevisionPending"))]
)
def test_pods_that_are_not_of_the_newest_revision_are_not_up_to_date(pending, found):
    assert brief(conditions_for(pending=pending)["UpToDate"]) == found
    ended = conditions_for(pending=None, phase=LifecyclePhase.FAILED)["UpToDate"]
    assert brief(ended) == ("True", "Ended")
