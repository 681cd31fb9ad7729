"""Plans for groups that an external autoscaler scales."""

from __future__ import annotations

from tests.unit.operator.decisions.plans import (
    ROLLOUTS,
    desired_for,
    plan_names,
    settled_cluster,
    with_keys,
)
from vcpo_operator.children import Kind
from vcpo_operator.decisions.actions import ReportScale, Scale, SeedScaler
from vcpo_operator.decisions.lifecycle import LifecyclePhase
from vcpo_operator.decisions.plan import plan

OUTSIDE = [{**ROLLOUTS[0], "scaling": "External"}]


def test_a_group_that_an_autoscaler_scales_follows_its_scaler():
    cluster = settled_cluster(desired_for(rollouts=OUTSIDE))
    asked = desired_for(rollouts=OUTSIDE, asked={"main": 4})
    assert plan_names(asked, cluster) == ["Scale demo-rollout-main 4", "Report demo-rollout-main 2"]
    cluster._scale("demo-rollout-main", 4)
    assert plan_names(asked, cluster) == [
        "Apply Deployment demo-rollout-main",
        "Report demo-rollout-main 4",
    ]


def test_an_autoscaler_is_held_to_the_bounds_of_the_run():
    assert desired_for(rollouts=OUTSIDE, asked={"main": 99}).replicas == {"main": 6}
    assert desired_for(rollouts=OUTSIDE, asked={"main": 0}).replicas == {"main": 2}


def test_a_scaler_starts_with_the_least_number_of_workers():
    actions = plan_names(desired_for(rollouts=OUTSIDE), with_keys())
    at = actions.index("Seed demo-rollout-main 2")
    assert actions[at + 1] == "Apply VCPORolloutScaler demo-rollout-main"


def test_a_group_that_is_handed_to_an_autoscaler_keeps_its_workers():
    cluster = settled_cluster(desired_for())
    cluster.execute([Scale(name="demo-rollout-main", replicas=5)])
    assert "Seed demo-rollout-main 5" in plan_names(desired_for(rollouts=OUTSIDE), cluster)


def test_a_scaler_never_starts_with_none():
    idle = [{**OUTSIDE[0], "minReplicas": 0}]
    assert "Seed demo-rollout-main 1" in plan_names(desired_for(rollouts=idle), with_keys())
    assert "Seed demo-rollout-main 2" in plan_names(
        desired_for(LifecyclePhase.SUSPEND, rollouts=OUTSIDE),
        settled_cluster(desired_for(LifecyclePhase.SUSPEND)),
    )


def test_a_scaler_that_a_dying_operator_has_seeded_is_seeded_no_more():
    cluster = with_keys()
    actions = plan(desired_for(rollouts=OUTSIDE), cluster.observed, applied={})
    seeded = next(n for n, each in enumerate(actions) if isinstance(each, SeedScaler))
    cluster.execute(actions[: seeded + 1])
    cluster.request_replicas("main", 4)
    rest = plan_names(desired_for(rollouts=OUTSIDE), cluster)
    assert "Apply VCPORolloutScaler demo-rollout-main" in rest
    assert not any(each.startswith("Seed") for each in rest)


def test_before_its_scaler_is_there_a_group_is_left_alone():
    assert desired_for(rollouts=OUTSIDE).replicas == {}


def test_a_scaler_leaves_its_number_to_the_autoscaler():
    (scaler,) = (
        each for each in desired_for(rollouts=OUTSIDE).children if each.kind is Kind.SCALER
    )
    assert scaler.manifest["spec"] == {"group": "main"}


def test_a_scaler_tells_which_pods_it_is_about():
    cluster = with_keys()
    cluster.execute(plan(desired_for(rollouts=OUTSIDE), cluster.observed, applied=cluster.applied))
    told = plan(desired_for(rollouts=OUTSIDE), cluster.observed, applied=cluster.applied)[-1]
    assert isinstance(told, ReportScale)
    assert told.selector == "vcpo.dev/run=demo,vcpo.dev/role=rollout,vcpo.dev/group=main"


def test_a_group_that_is_scaled_from_inside_again_loses_its_scaler():
    cluster = settled_cluster(desired_for(rollouts=OUTSIDE))
    assert plan_names(desired_for(), cluster) == ["Delete VCPORolloutScaler demo-rollout-main"]


def test_after_a_rest_an_external_group_follows_its_scaler_again():
    cluster = settled_cluster(desired_for(LifecyclePhase.SUSPEND, rollouts=OUTSIDE))
    actions = plan_names(desired_for(rollouts=OUTSIDE, asked={"main": 3}), cluster)
    assert "Scale demo-rollout-main 3" in actions
