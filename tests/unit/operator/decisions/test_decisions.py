"""When a run ends, is suspended or continues, and when it is reconciled next."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.operator.runs import (
    DEFAULTS,
    KEY,
    UID,
    FakeCluster,
    make_run,
    parent,
    pod,
    signals,
)
from tests.unit.operator.decisions.plans import decision, desired_for, plan_names, settled_cluster
from vcpo.control.decision import ControlState
from vcpo.control.limits import lag_change
from vcpo.wire.phase import RunPhase
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.autoscale import AutoscaleDecision, decide_autoscale, stored_state
from vcpo_operator.decisions.conflicts import is_ours, keep_size, name_conflict
from vcpo_operator.decisions.desired import DesiredState
from vcpo_operator.decisions.lifecycle import (
    LearnerDrain,
    LifecyclePhase,
    RunVerdict,
    is_past_time_to_live,
    judge,
    next_phase_change_s,
    starts_new_attempt,
)
from vcpo_operator.decisions.plan import first_conflict, plan
from vcpo_operator.decisions.snapshot import (
    Snapshot,
    judge_run,
    signals_of_this_run,
    signals_period_s,
)
from vcpo_operator.names import Role
from vcpo_operator.observed.records import (
    ObservedChild,
    ObservedClaim,
    ObservedGroup,
    ObservedState,
    RunRecord,
)
from vcpo_operator.observed.status import RunStatus, StatusCondition

_MAX_TURNS = 4
few = settings(max_examples=25)  # one example writes several run files, which is slow


@st.composite
def desired_states(draw: st.DrawFn) -> DesiredState:
    chosen = draw(st.lists(st.sampled_from(("main", "extra", "eval")), min_size=1, unique=True))
    groups = [
        {"name": name, "minReplicas": draw(st.integers(0, 3)), "maxReplicas": 8} for name in chosen
    ]
    phase = draw(st.sampled_from(list(LifecyclePhase)))
    decided = decision(**{name: draw(st.integers(0, 8)) for name in chosen})
    decided_now = decided if phase is LifecyclePhase.RUN else None
    return desired_for(phase, decided_now, rollouts=groups)


def settle(cluster: FakeCluster, desired: DesiredState) -> None:
    for _ in range(_MAX_TURNS):
        cluster.execute(plan(desired, cluster.observed, applied=cluster.applied))


@few
@given(st.lists(desired_states(), min_size=1, max_size=3))
def test_after_a_few_turns_nothing_is_left_to_do(history):
    cluster = FakeCluster()
    for desired in history:
        settle(cluster, desired)
    assert plan(history[-1], cluster.observed, applied=cluster.applied) == ()


@few
@given(desired_states(), st.data())
def test_a_plan_interrupted_anywhere_reaches_the_same_state(desired, data):
    whole, cut = FakeCluster(), FakeCluster()
    settle(whole, desired)
    actions = plan(desired, cut.observed, applied={})
    cut.execute(actions[: data.draw(st.integers(0, len(actions)))])
    cut.applied.clear()  # a new operator knows no versions
    settle(cut, desired)
    assert state(cut) == state(whole)


def state(cluster: FakeCluster) -> dict[object, str | None]:
    return {(each.kind, each.name): each.digest for each in cluster.observed.children}


NOW_S = 1_000_000.0


def make_observed(**replicas: int) -> ObservedState:
    groups = {}
    for name, wanted in replicas.items():
        child = ObservedChild(
            kind=Kind.DEPLOYMENT, name=name, uid=name, owner_uid="u", digest="d", version=1
        )
        groups[name] = ObservedGroup(child=child, group=name, replicas=wanted, ready=wanted)
    return ObservedState(groups=groups)


def decide(
    there: ObservedState, stored: Any = None, says: Any = None, **group: Any
) -> AutoscaleDecision:
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6, **group}]).spec
    return decide_autoscale(
        spec, known=None, stored=stored or {}, observed=there, signals=says, now_s=NOW_S
    )


def test_a_new_run_wants_its_least_number_of_workers():
    assert decide(ObservedState()).decision.replicas == {"main": 2}


def test_a_manual_scale_changes_the_desired_replicas():
    assert decide(make_observed(main=5)).decision.replicas == {"main": 5}


def test_a_manual_scale_restarts_the_cooldown():
    known = ControlState.start(make_run().spec, now_s=1.0)
    autoscale = decide(make_observed(main=5), stored=stored_state(known))
    assert autoscale.state.fleet.scaled_s == NOW_S


def test_a_scale_beyond_the_bounds_is_brought_back_to_them():
    assert decide(make_observed(main=9)).decision.replicas == {"main": 6}


def test_a_state_reads_back_as_it_was_stored():
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6}]).spec
    known = ControlState.start(spec, now_s=5.0, replicas={"main": 3})
    assert decide(make_observed(main=3), stored=stored_state(known)).state == known
    change = lag_change(before=8, after=4, reason="a low ESS", decided_s=4.0)
    known = dataclasses.replace(known, last_lag_change=change)
    assert decide(make_observed(main=3), stored=stored_state(known)).state == known


def test_what_is_unknown_is_not_stored():
    known = ControlState.start(make_run().spec, now_s=5.0)
    assert set(stored_state(known)["fleet"]) == {"replicas", "scaled_s"}


def test_without_a_stored_state_the_learner_s_limit_stays_in_force():
    autoscale = decide(ObservedState(), says=signals(lag_limit_steps=3, ess_ratio_mean=None))
    assert autoscale.decision.lag_limit_steps == 3


def there(kind: Kind = Kind.CONFIG_MAP, name: str = "demo-config", **changes: Any) -> ObservedChild:
    seen = {"uid": "u", "owner_uid": None, "digest": None, "version": 1, **changes}
    return ObservedChild(kind=kind, name=name, **seen)


def claim(storage: str = "50Gi", **changes: Any) -> ObservedClaim:
    child = there(Kind.CLAIM, "demo-learner", **{"digest": "d", **changes})
    return ObservedClaim(child=child, storage=storage)


def made_claim(**learner: Any) -> Child:
    (made,) = (
        each
        for each in build_children(parent(learner=learner), DEFAULTS)
        if each.kind is Kind.CLAIM
    )
    return made


@pytest.mark.parametrize(
    ("found", "ours"),
    [
        (there(owner_uid=UID), True),
        (there(owner_uid="other"), False),
        (there(owner_uid="other", adoptable=True), False),
        (there(), False),
        (there(digest="d"), False),  # an orphan: its run was deleted and it was to stay
        (there(adoptable=True), True),
        (claim().child, True),  # what an earlier run left behind
        (claim(digest=None).child, False),
        (claim(digest=None, adoptable=True).child, True),
    ],
)
def test_what_has_our_owner_or_an_annotation_or_is_a_kept_claim_is_ours(
    found: ObservedChild, ours: bool
):
    assert is_ours(found, UID) is ours
    assert (name_conflict(found, UID) is None) is ours


def test_nothing_is_created_after_a_conflict():
    state = desired_for()
    taken = ObservedState(children=(there(Kind.SERVICE, "demo-learner"),))
    from_nothing = plan_names(state, settled_cluster(state))
    assert from_nothing == []
    cluster = settled_cluster(state)
    cluster.applied.clear()
    others = [each for each in cluster.observed.children if each.kind is not Kind.SERVICE]
    cluster.observed = dataclasses.replace(cluster.observed, children=(*others, *taken.children))
    assert plan_names(state, cluster) == [
        "Apply ConfigMap demo-config",
        "Apply PersistentVolumeClaim demo-learner",
    ]
    assert first_conflict(state, cluster.observed) == name_conflict(taken.children[0], UID)


@pytest.mark.parametrize(
    ("storage", "applied"), [("100Gi", "100Gi"), ("1Ti", "1Ti"), ("50Gi", "50Gi"), ("1Gi", "50Gi")]
)
def test_a_claim_never_shrinks(storage: str, applied: str):
    made = keep_size(made_claim(), claim(storage), may_grow=True)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == applied
    assert (made.digest == made_claim().digest) is (applied == "50Gi")


@pytest.mark.parametrize("storage", ["20Gi", "50Gi", "1Ti"])
def test_a_claim_keeps_its_size_if_the_run_asks_for_none(storage: str):
    made = keep_size(made_claim(), claim(storage), may_grow=False)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == storage


@pytest.mark.parametrize(
    ("learner", "grows"), [({}, False), ({"checkpointStorageGibibytes": 60}, True)]
)
def test_a_claim_grows_only_if_the_run_asks_for_it(learner: dict[str, int], grows: bool):
    cluster = settled_cluster(desired_for(learner={"checkpointStorageGibibytes": 42}))
    child = cluster.observed.child(Kind.CLAIM, "demo-learner")
    assert child is not None
    there = ObservedClaim(child=child, storage="42Gi")
    cluster.observed = dataclasses.replace(cluster.observed, claims={child.name: there})
    planned = plan_names(desired_for(learner=learner), cluster)
    assert ("Apply PersistentVolumeClaim demo-learner" in planned) is grows


LEARNER = ObservedState(pods=(pod("demo-learner-0", Role.LEARNER),))
RECORD = RunRecord(
    key=KEY, uid=UID, generation=1, resource_version=1, deleting=False, spec={}, status={}
)


def snapshot(
    phase: LifecyclePhase,
    draining: LearnerDrain | None = None,
    *,
    node: str | None = None,
    **spec: Any,
) -> Snapshot:
    """A run whose learner has a pod, on a node or without one."""
    status = RunStatus(start_s=0.0, admission_s=0.0, first_step_s=1.0)
    return Snapshot(
        record=RECORD,
        run=make_run(**spec),
        before=status,
        current=status,
        observed=ObservedState(pods=(pod("demo-learner-0", Role.LEARNER, node=node),)),
        signals=None,
        verdict=RunVerdict(phase=phase),
        draining=draining,
        is_new_attempt=False,
        now_s=0.0,
    )


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


WAITING = LearnerDrain(reason="because", since_s=0.0, until_s=120.0)


@pytest.mark.parametrize(
    ("run", "now_s", "requeue_after_s"),
    [
        (snapshot(LifecyclePhase.SUSPEND), 0.0, 60.0),
        (snapshot(LifecyclePhase.RUN, node="n", control={"pollSeconds": 7.0}), 0.0, 7.0),
        (snapshot(LifecyclePhase.RUN, control={"pollSeconds": 7.0}), 0.0, 15.0),
        (snapshot(LifecyclePhase.RUN, activeDeadlineSeconds=100), 99.5, 0.5),
        (snapshot(LifecyclePhase.SUSPEND, WAITING), 10.0, 1.0),
        (snapshot(LifecyclePhase.SUSPEND, WAITING), 119.75, 0.25),
    ],
    ids=["at rest", "active", "pending", "deadline", "waits for the learner", "end of the wait"],
)
def test_a_run_is_reconciled_again_in_time(run, now_s, requeue_after_s):
    assert run.requeue_after_s(now_s) == requeue_after_s


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


def test_the_next_reconciliation_is_at_the_first_deadline_of_a_run_that_does_not_rest():
    spec = make_run(activeDeadlineSeconds=500, startupDeadlineSeconds=100).spec
    running = RunVerdict(phase=LifecyclePhase.RUN)
    assert next_phase_change_s(spec, started_status(first_step_s=None), running) == START_S + 100
    assert next_phase_change_s(spec, started_status(), running) == START_S + 500
    waiting = started_status(admission_s=None)
    assert next_phase_change_s(spec, waiting, running) is None
    patient = make_run(pendingDeadlineSeconds=90).spec
    assert next_phase_change_s(patient, waiting, running) == START_S + 90
    resting = RunVerdict(phase=LifecyclePhase.SUSPEND)
    assert next_phase_change_s(spec, started_status(), resting) is None


def test_an_ended_run_lives_as_long_as_it_is_given_or_stays():
    spec = make_run(ttlSecondsAfterFinished=60).spec
    status = ended_status("Complete")
    assert not is_past_time_to_live(spec, status, 2_059.0)
    assert is_past_time_to_live(spec, status, 2_060.0)
    assert next_phase_change_s(spec, status, RunVerdict(phase=LifecyclePhase.COMPLETE)) == 2_060.0
    assert not is_past_time_to_live(make_run().spec, ended_status("Complete"), 1e12)
