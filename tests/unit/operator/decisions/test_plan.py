"""Plans: the exact actions in their order."""

import dataclasses

import pytest

from tests.fixtures.operator.runs import KEY, UID, FakeCluster, names, pod, signals
from tests.fixtures.operator.runs import template_digest as digest_of
from tests.unit.operator.decisions.plans import (
    ROLLOUTS,
    decision,
    desired_for,
    plan_names,
    settled_cluster,
    with_keys,
)
from vcpo.control.signals import WorkerSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.children import Kind
from vcpo_operator.decisions.lifecycle import LearnerDrain, LifecyclePhase
from vcpo_operator.decisions.plan import (
    IssueSecret,
    ReleaseLeases,
    Throttle,
    first_conflict,
    on_delete_actions,
    plan,
)
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedChild, ObservedState

EVERYTHING = [
    "Apply ConfigMap demo-config",
    "Apply PersistentVolumeClaim demo-learner",
    "Apply Service demo-learner",
    "Apply ServiceAccount demo-workload",
    "Apply NetworkPolicy demo",
    "Apply PodDisruptionBudget demo-learner",
    "Apply PodDisruptionBudget demo-rollout-main",
    "Apply StatefulSet demo-learner",
]


def test_a_new_run_gets_its_certificates_and_keys_first_and_nothing_beside_them():
    assert plan_names(desired_for(), FakeCluster()) == ["Issue demo-tls", "Issue demo-keys"]


def test_certificates_that_end_soon_are_renewed_and_nothing_else_is_done():
    cluster = settled_cluster(desired_for())
    due = dataclasses.replace(cluster.observed, certificates_due=True)
    (action,) = plan(desired_for(), due, applied=cluster.applied)
    assert isinstance(action, IssueSecret)
    assert action.renews


def test_a_run_in_plain_text_needs_no_certificates():
    plain = desired_for(pods={"transport": "PlainText"})
    assert plan_names(plain, FakeCluster()) == ["Issue demo-keys"]


def test_a_new_run_gets_everything_with_the_number_of_workers_that_was_decided():
    assert plan_names(desired_for(), with_keys()) == [
        *EVERYTHING,
        "Apply Deployment demo-rollout-main 2",
    ]


def test_a_new_operator_applies_every_child_once():
    cluster = settled_cluster(desired_for())
    cluster.applied.clear()
    assert plan_names(desired_for(), cluster) == [
        *EVERYTHING,
        "Apply Deployment demo-rollout-main 2",
    ]


def test_a_new_image_of_workers_changes_their_deployment_and_leaves_the_learner():
    cluster = settled_cluster(desired_for())
    changed = desired_for(rollouts=[{**ROLLOUTS[0], "image": "mine:2"}])
    assert plan_names(changed, cluster) == [
        "Apply ConfigMap demo-config",
        "Apply Deployment demo-rollout-main 2",
    ]


def test_a_decision_and_a_persons_change_of_the_scale_are_one_apply():
    cluster = settled_cluster(desired_for())
    wanted = ["Apply Deployment demo-rollout-main 5"]
    assert plan_names(desired_for(decided=decision(main=5)), cluster) == wanted
    cluster.scale("demo-rollout-main", 4)
    assert plan_names(desired_for(decided=decision(main=5)), cluster) == wanted


def test_a_suspended_run_has_no_pods_and_keeps_its_other_objects():
    assert plan_names(desired_for(LifecyclePhase.SUSPEND), settled_cluster(desired_for())) == [
        "Apply StatefulSet demo-learner",
        "Apply Deployment demo-rollout-main 0",
    ]
    assert plan_names(desired_for(LifecyclePhase.SUSPEND), with_keys())[-1:] == [
        "Apply Deployment demo-rollout-main 0"
    ]


def test_a_group_that_left_the_spec_is_deleted_with_its_budget():
    two = [*ROLLOUTS, {"name": "extra", "minReplicas": 3, "maxReplicas": 3}]
    cluster = settled_cluster(desired_for(rollouts=two))
    assert plan_names(desired_for(), cluster)[-2:] == [
        "Delete PodDisruptionBudget demo-rollout-extra",
        "Delete Deployment demo-rollout-extra",
    ]


WAITING = LearnerDrain(reason="because", since_s=0.0, until_s=120.0)
OVER = LearnerDrain(reason="because", since_s=0.0, until_s=None)


@pytest.mark.parametrize("phase", [LifecyclePhase.SUSPEND, LifecyclePhase.FAILED])
def test_nothing_is_taken_away_before_the_learner_has_ended_in_order(phase):
    desired = desired_for(phase, draining=WAITING)
    cluster = settled_cluster(desired_for())
    assert plan_names(desired, cluster, signals=signals()) == ["Drain: because"]
    assert plan_names(desired, cluster, signals=signals().at_age(1.0)) == []
    draining = signals(phase=RunPhase.DRAINING)
    assert plan_names(desired, cluster, signals=draining) == []


def test_a_draining_learner_does_not_wait_for_workers_that_are_gone():
    workers = {"gone": WorkerSignals(in_flight=3, silent_s=60.0)}
    draining = signals(phase=RunPhase.DRAINING, workers=workers)
    desired = desired_for(LifecyclePhase.SUSPEND, draining=WAITING)
    actions = plan_names(desired, settled_cluster(desired_for()), signals=draining)
    assert actions == [str(ReleaseLeases(worker="gone"))]


def test_what_was_waited_for_goes_all_at_once():
    desired = desired_for(LifecyclePhase.SUSPEND, draining=OVER)
    actions = plan_names(desired, settled_cluster(desired_for()), signals=signals())
    assert actions == ["Apply StatefulSet demo-learner", "Apply Deployment demo-rollout-main 0"]


def test_a_run_that_is_deleted_tells_a_learner_that_trains():
    assert names(on_delete_actions(signals())) == ["Drain: the run is deleted"]
    assert on_delete_actions(signals(phase=RunPhase.DRAINING)) == ()
    assert on_delete_actions(None) == ()


def test_what_was_never_seen_is_applied_without_force():
    actions = plan(desired_for(), with_keys().observed, applied={})
    assert not actions[0].force


def test_a_child_that_was_deleted_is_made_again():
    cluster = settled_cluster(desired_for())
    cluster._delete(Kind.SERVICE, "demo-learner")
    assert plan_names(desired_for(), cluster) == ["Apply Service demo-learner"]


def test_a_child_that_somebody_changed_is_applied_again():
    cluster = settled_cluster(desired_for())
    cluster.touch(Kind.NETWORK_POLICY, "demo")
    assert plan_names(desired_for(), cluster) == ["Apply NetworkPolicy demo"]


def test_before_a_removal_the_emptiest_worker_is_made_the_cheapest():
    cluster = settled_cluster(desired_for(decided=decision(main=3)))
    cluster.observed = dataclasses.replace(cluster.observed, pods=(pod("a"), pod("b"), pod("c")))
    workers = {
        "a": WorkerSignals(in_flight=7, silent_s=0.0),
        "c": WorkerSignals(in_flight=2, silent_s=0.0),
    }
    assert plan_names(desired_for(), cluster, signals=signals(workers=workers)) == [
        "Cost a 7",
        "Cost c 2",
        "Apply Deployment demo-rollout-main 2",
    ]


def test_a_complete_run_keeps_its_claim_only():
    actions = plan_names(desired_for(LifecyclePhase.COMPLETE), settled_cluster(desired_for()))
    assert sorted(actions) == [
        "Delete ConfigMap demo-config",
        "Delete Deployment demo-rollout-main",
        "Delete NetworkPolicy demo",
        "Delete PodDisruptionBudget demo-learner",
        "Delete PodDisruptionBudget demo-rollout-main",
        "Delete Service demo-learner",
        "Delete ServiceAccount demo-workload",
        "Delete StatefulSet demo-learner",
    ]


def test_a_claim_that_goes_with_the_run_survives_the_run_s_end():
    deleted = {"checkpointStorageRetention": "Delete"}
    cluster = settled_cluster(desired_for(learner=deleted))
    actions = plan_names(desired_for(LifecyclePhase.COMPLETE, learner=deleted), cluster)
    assert "Delete PersistentVolumeClaim demo-learner" not in actions


def test_a_failed_run_lets_go_of_everything_but_its_volume():
    assert plan_names(
        desired_for(LifecyclePhase.FAILED), settled_cluster(desired_for())
    ) == plan_names(desired_for(LifecyclePhase.COMPLETE), settled_cluster(desired_for()))


def test_a_learner_s_pod_of_an_older_template_is_replaced():
    state = desired_for()
    cluster = settled_cluster(state)
    current = digest_of(state.children[-2])
    pods = (
        pod("demo-learner-0", Role.LEARNER, template_digest="older"),
        pod("demo-learner-1", Role.LEARNER, template_digest=current),
    )
    cluster.observed = dataclasses.replace(cluster.observed, pods=pods)
    assert plan_names(state, cluster) == ["Delete Pod demo-learner-0"]


def test_all_pods_of_an_attempt_that_is_over_are_replaced():
    state = dataclasses.replace(desired_for(), restarts_learner=True)
    cluster = settled_cluster(desired_for())
    current = digest_of(state.children[-2])
    leaving = pod("demo-learner-1", Role.LEARNER, terminating=True)
    pods = (pod("demo-learner-0", Role.LEARNER, template_digest=current), leaving)
    cluster.observed = dataclasses.replace(cluster.observed, pods=pods)
    assert plan_names(state, cluster) == ["Delete Pod demo-learner-0"]


def test_no_pod_is_replaced_before_its_controller_has_seen_the_new_template():
    cluster = settled_cluster(desired_for())
    learner = dataclasses.replace(cluster.observed.learner, is_up_to_date=False)
    pods = (pod("demo-learner-0", Role.LEARNER, template_digest="older"),)
    cluster.observed = dataclasses.replace(cluster.observed, pods=pods, learner=learner)
    assert plan_names(desired_for(), cluster) == []


def test_an_object_of_an_earlier_run_of_the_same_name_is_not_touched():
    unowned = ObservedChild(
        kind=Kind.SERVICE,
        name="demo-learner",
        uid="old",
        owner_uid="earlier",
        digest=None,
        version=1,
    )
    observed = ObservedState(children=(*with_keys().observed.children, unowned))
    assert names(plan(desired_for(), observed, applied={})) == EVERYTHING[:2]
    conflict = first_conflict(desired_for(), observed)
    assert conflict is not None
    assert (
        conflict.message
        == "Service demo-learner belongs to another owner; the operator waits until it is deleted"
    )


def test_the_learner_is_sent_a_limit_that_it_does_not_have():
    state, cluster = desired_for(decided=decision(lag=4, main=2)), settled_cluster(desired_for())
    told = plan(state, cluster.observed, applied=cluster.applied, signals=signals())
    assert told == (Throttle(lag_limit_steps=4, reason="because"),)


def test_an_old_report_tells_nobody_anything():
    state, cluster = desired_for(decided=decision(lag=4, main=2)), settled_cluster(desired_for())
    assert plan_names(state, cluster, signals=signals().at_age(5.0)) == []


def test_a_report_is_acted_on_once_however_long_ago_it_was_scraped():
    state, cluster = desired_for(decided=decision(lag=4, main=2)), settled_cluster(desired_for())
    scraped = dataclasses.replace(signals().at_age(5.0), is_fresh=True)
    told = plan(state, cluster.observed, applied=cluster.applied, signals=scraped)
    assert told == (Throttle(lag_limit_steps=4, reason="because"),)


def test_leases_of_a_worker_without_a_pod_are_released():
    cluster = settled_cluster(desired_for())
    workers = {
        "gone": WorkerSignals(in_flight=3, silent_s=16.0),
        "new": WorkerSignals(in_flight=3, silent_s=1.0),
    }
    actions = plan(
        desired_for(), cluster.observed, applied=cluster.applied, signals=signals(workers=workers)
    )
    assert actions == (ReleaseLeases(worker="gone"),)


def test_every_child_belongs_to_the_run_but_a_retained_claim():
    owners = {
        f"{child.kind.kind} {child.name}": child.manifest["metadata"].get("ownerReferences")
        for child in desired_for().children
    }
    assert owners.pop("PersistentVolumeClaim demo-learner") is None
    assert {owner[0]["uid"] for owner in owners.values() if owner} == {UID}
    assert all(owners.values())
    assert all(
        child.manifest["metadata"]["namespace"] == KEY.namespace for child in desired_for().children
    )
