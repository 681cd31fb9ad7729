"""Plans for groups that an autoscaler or a person scales, and for those that rest."""

from __future__ import annotations

from tests.unit.operator.decisions.plans import (
    ROLLOUTS,
    decision,
    desired_for,
    plan_names,
    settled_cluster,
    with_keys,
)
from vcpo_operator.decisions.lifecycle import LifecyclePhase
from vcpo_operator.decisions.plan import plan

OUTSIDE = [{**ROLLOUTS[0], "scaling": "External"}]
IDLE = [{**OUTSIDE[0], "minReplicas": 0}]
MAIN = "demo-rollout-main"


def resting_cluster(rollouts=OUTSIDE, *, had):
    """A suspended run's cluster, in which the group had workers before."""
    cluster = settled_cluster(desired_for(rollouts=rollouts))
    cluster.scale(MAIN, had)
    suspend(cluster, rollouts)
    return cluster


def suspend(cluster, rollouts=OUTSIDE):
    turn(cluster, desired_for(LifecyclePhase.SUSPEND, rollouts=rollouts))


def turn(cluster, desired):
    cluster.execute(plan(desired, cluster.observed, applied=cluster.applied))


def scalings(desired, cluster):
    return [each for each in plan_names(desired, cluster) if not each.startswith("Apply")]


def test_a_group_that_others_scale_starts_with_its_minimum():
    assert f"Scale {MAIN} 2" in plan_names(desired_for(rollouts=OUTSIDE), with_keys())


def test_it_never_starts_with_none_at_which_an_autoscaler_does_nothing():
    assert desired_for(rollouts=IDLE).seeds == {"main": 1}


def test_from_then_on_every_number_is_left_alone():
    for replicas in (0, 1, 99):
        cluster = settled_cluster(desired_for(rollouts=OUTSIDE))
        cluster.scale(MAIN, replicas)
        assert scalings(desired_for(rollouts=OUTSIDE), cluster) == []


def test_a_group_that_is_handed_over_keeps_its_workers():
    cluster = settled_cluster(desired_for())
    cluster.scale(MAIN, 5)
    assert scalings(desired_for(rollouts=OUTSIDE), cluster) == []


def test_a_suspension_notes_the_number_that_it_takes_away():
    cluster = settled_cluster(desired_for(rollouts=OUTSIDE))
    cluster.scale(MAIN, 5)
    resting = desired_for(LifecyclePhase.SUSPEND, rollouts=OUTSIDE)
    assert scalings(resting, cluster) == [f"Suspend {MAIN} 5"]
    turn(cluster, resting)
    assert scalings(resting, cluster) == []


def test_a_group_comes_back_with_the_number_that_it_had():
    cluster = resting_cluster(had=5)
    assert scalings(desired_for(rollouts=OUTSIDE), cluster) == [f"Resume {MAIN} 5"]
    turn(cluster, desired_for(rollouts=OUTSIDE))
    cluster.scale(MAIN, 0)
    assert scalings(desired_for(rollouts=OUTSIDE), cluster) == []


def test_it_comes_back_with_its_minimum_at_least():
    more = [{**OUTSIDE[0], "minReplicas": 4}]
    assert scalings(desired_for(rollouts=more), resting_cluster(had=2)) == [f"Resume {MAIN} 4"]
    idle = resting_cluster(IDLE, had=0)
    assert scalings(desired_for(rollouts=IDLE), idle) == [f"Resume {MAIN} 1"]


def test_a_group_that_is_woken_while_it_rests_is_set_to_zero_again_and_the_note_stays():
    cluster = resting_cluster(had=5)
    cluster.scale(MAIN, 1)
    resting = desired_for(LifecyclePhase.SUSPEND, rollouts=OUTSIDE)
    assert scalings(resting, cluster) == [f"Suspend {MAIN} 5"]


def test_a_group_that_changes_hands_while_it_rests_comes_back_too():
    assert scalings(desired_for(rollouts=OUTSIDE), resting_cluster(ROLLOUTS, had=3)) == [
        f"Resume {MAIN} 3"
    ]
    assert scalings(desired_for(decided=decision(main=4)), resting_cluster(OUTSIDE, had=3)) == [
        f"Resume {MAIN} 4"
    ]


def test_a_run_that_was_suspended_from_the_start_begins_with_the_minimum():
    cluster = settled_cluster(desired_for(LifecyclePhase.SUSPEND, rollouts=OUTSIDE))
    suspend(cluster)
    assert scalings(desired_for(rollouts=OUTSIDE), cluster) == [f"Resume {MAIN} 2"]
