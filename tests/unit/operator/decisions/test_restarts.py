"""A learner of several pods: one that ends takes the others with it, once, and is named."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fixtures.operator.runs import make_run, pod, signals
from tests.unit.operator.decisions.plans import desired_for, plan_names, settled_cluster
from vcpo.service.lifecycle import RANK_LOST
from vcpo_operator.children.manifest import Kind
from vcpo_operator.decisions import status
from vcpo_operator.decisions.conditions import ConditionInputs, condition_states
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.decisions.plan import Delete, plan
from vcpo_operator.decisions.status import with_pods, with_restarts
from vcpo_operator.names import Role
from vcpo_operator.observed.records import (
    Cause,
    ObservedChild,
    ObservedLearner,
    ObservedPod,
    ObservedState,
)
from vcpo_operator.observed.status import ContainerEnd, LearnerStatus, RunStatus, from_rfc3339


def rank_pod(index: int, **changes: Any) -> ObservedPod:
    return pod(f"demo-learner-{index}", Role.LEARNER, index=index, **changes)


def ended(index: int, exit_code: int = 1, message: str = "ValueError: bad", second: int = 0):
    return ContainerEnd(
        pod=f"demo-learner-{index}",
        exit_code=exit_code,
        reason="Error",
        message=message,
        end_s=from_rfc3339(f"2026-01-01T00:00:{second:02d}Z"),
    )


def count(
    learner: LearnerStatus, *pods: ObservedPod, num_pods: int = 2, step: int = 0
) -> LearnerStatus:
    return with_pods(learner, pods, num_pods=num_pods, step=step)


TOGETHER = count(LearnerStatus(), rank_pod(0), rank_pod(1))


def test_pods_are_a_group_once_the_first_one_answers():
    assert TOGETHER.group == ("uid-demo-learner-0", "uid-demo-learner-1")
    assert count(LearnerStatus(), rank_pod(0, ready=False), rank_pod(1)).group == ()
    assert count(LearnerStatus(), rank_pod(0)).group == ()


def test_a_learner_of_one_pod_replaces_none():
    alone = count(LearnerStatus(), rank_pod(0), num_pods=1)
    after = count(alone, rank_pod(0, restarts=1), num_pods=1)
    assert (alone.group, after.replaced, after.restarts) == ((), (), 1)


@pytest.mark.parametrize("crashed", [0, 1])
def test_when_a_container_ends_all_pods_of_the_group_are_replaced_and_one_restart_is_counted(
    crashed,
):
    pods = [rank_pod(index, restarts=int(index == crashed)) for index in range(2)]
    after = count(TOGETHER, *pods)
    assert set(after.replaced) == set(TOGETHER.group)
    assert (after.restarts, after.failures, after.group) == (1, 1, ())


def test_ranks_that_end_with_the_first_one_are_not_counted_again():
    broken = count(TOGETHER, rank_pod(0), rank_pod(1, restarts=1))
    later = count(broken, rank_pod(0, restarts=1), rank_pod(1, restarts=2))
    assert (later.restarts, later.replaced) == (1, broken.replaced)
    both = count(TOGETHER, rank_pod(0, restarts=1), rank_pod(1, restarts=1))
    assert both.restarts == 1


def test_a_pod_that_goes_takes_the_others_with_it_and_is_no_restart():
    after = count(TOGETHER, rank_pod(0))
    assert (after.replaced, after.restarts) == (("uid-demo-learner-0",), 0)


def test_new_pods_are_left_alone_until_they_have_met():
    broken = count(TOGETHER, rank_pod(0), rank_pod(1, restarts=1))
    halfway = count(broken, rank_pod(0, uid="new-0", ready=False), rank_pod(1, restarts=1))
    assert halfway.replaced == ("uid-demo-learner-1",)
    gone = count(halfway, rank_pod(0, uid="new-0", ready=False))
    assert (gone.replaced, gone.group) == ((), ())
    started = count(
        gone, rank_pod(0, uid="new-0", ready=False), rank_pod(1, uid="new-1", restarts=1)
    )
    assert (started.replaced, started.restarts) == ((), 2)  # it failed to start: counted, and alone
    met = count(started, rank_pod(0, uid="new-0"), rank_pod(1, uid="new-1", restarts=1))
    assert met.group == ("new-0", "new-1")


def test_the_end_that_caused_the_others_is_the_one_that_is_kept():
    before = RunStatus(learner=TOGETHER)
    observed = ObservedState(
        pods=(
            rank_pod(0, restarts=1, last_end=ended(0, RANK_LOST, "rank 1 is gone")),
            rank_pod(1, restarts=1, last_end=ended(1, second=1)),
        )
    )
    after = with_restarts(before, observed, num_pods=2)
    assert after.learner.last_end.pod == "demo-learner-1"
    # The pods are new, and the end is still known.
    new = ObservedState(pods=(rank_pod(0, uid="a"), rank_pod(1, uid="b")))
    assert with_restarts(after, new, num_pods=2).learner.last_end == after.learner.last_end


def test_an_end_that_was_counted_before_is_not_the_cause_of_a_later_one():
    old = rank_pod(0, restarts=1, last_end=ended(0, second=1))
    counted = count(TOGETHER, old, rank_pod(1))
    met = counted.but(group=TOGETHER.group, replaced=())
    new = rank_pod(1, restarts=1, last_end=ended(1, message="OSError: disk", second=9))
    assert count(met, old, new).last_end == new.last_end
    # And a restart whose end nobody tells of leaves what is known.
    assert count(met, old, rank_pod(1, restarts=1)).last_end == old.last_end


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_restarts_of_one_pod_are_counted_once_and_a_new_pod_adds_its_own(restarts):
    first = count(LearnerStatus(), rank_pod(0, restarts=2), num_pods=1)
    assert first.restarts == 2
    assert count(first, rank_pod(0, restarts=2), num_pods=1) == first
    new = rank_pod(0, uid="new", restarts=restarts)
    assert count(first, new, num_pods=1).restarts == 2 + restarts


def test_only_steps_beyond_the_furthest_one_give_restarts_back():
    in_a_row, learner = [], LearnerStatus()
    for restarts, step in [(1, 0), (3, 0), (4, 60), (5, 55), (6, 60), (7, 61)]:
        learner = count(learner, rank_pod(0, restarts=restarts), num_pods=1, step=step)
        in_a_row.append(learner.failures)
    assert in_a_row == [1, 3, 1, 2, 3, 1]
    assert learner.restarts == 7


def deletions(*pods: ObservedPod, replaced: tuple[str, ...]) -> list[Delete]:
    state = replace(desired_for(learner={"replicas": 2}), replaced_pods=replaced)
    cluster = settled_cluster(state)
    observed = replace(cluster.observed, pods=pods)
    actions = plan(state, observed, applied=cluster.applied)
    return [each for each in actions if isinstance(each, Delete) and each.uid in replaced]


def test_ranks_of_a_crashed_group_are_ended_at_once():
    pods = rank_pod(0), rank_pod(1, ready=False)
    uids = tuple(each.uid for each in pods)
    found = deletions(*pods, replaced=uids)
    assert [(each.name, each.grace_s) for each in found] == [
        ("demo-learner-0", 1),
        ("demo-learner-1", 1),
    ]


def test_ranks_of_a_group_that_loses_a_pod_in_order_have_the_time_to_save():
    pods = rank_pod(0), rank_pod(1, terminating=True)
    (found,) = deletions(*pods, replaced=(pods[0].uid,))
    assert (found.name, found.grace_s) == ("demo-learner-0", None)


def test_pods_of_a_new_group_stay():
    assert deletions(rank_pod(0, uid="new"), rank_pod(1, uid="new-1"), replaced=("old",)) == []


def test_a_finished_run_replaces_nothing():
    state = desired_for(LifecyclePhase.COMPLETE, learner={"replicas": 2})
    assert state.replaced_pods == ()
    assert plan_names(state, settled_cluster(state)) == []


def stateful_set(**changes: Any) -> ObservedLearner:
    child = ObservedChild(
        kind=Kind.STATEFUL_SET,
        name="demo-learner",
        uid="set",
        owner_uid=None,
        digest=None,
        version=1,
    )
    return ObservedLearner(**{"child": child, "replicas": 3, "is_up_to_date": True, **changes})


def learner_ready(*pods: ObservedPod, **changes: Any) -> tuple[str, str, str]:
    inputs = ConditionInputs(
        spec=make_run(learner={"replicas": 3}).spec,
        verdict=RunVerdict(phase=LifecyclePhase.RUN),
        observed=ObservedState(learner=stateful_set(), pods=pods),
        decision=None,
        has_stepped=True,
        **changes,
    )
    (found,) = (each for each in condition_states(inputs) if each.type == "LearnerReady")
    return found.status, found.reason, found.message


def test_the_learner_is_ready_when_its_first_pod_answers_and_no_other_is_missing():
    others = rank_pod(1, ready=False), rank_pod(2, ready=False)
    assert learner_ready(rank_pod(0), *others)[:2] == ("True", "PodReady")
    assert learner_ready(rank_pod(0, ready=False), *others, signals=signals())[0] == "True"
    assert learner_ready(rank_pod(0, ready=False), rank_pod(1), rank_pod(2)) == (
        "False",
        "PodPending",
        "2 of the learner's 3 pods are ready; waiting for demo-learner-0.",
    )
    assert learner_ready(rank_pod(0), rank_pod(2)) == (
        "False",
        "PodPending",
        "2 of the learner's 3 pods are ready; waiting for demo-learner-1.",
    )


def test_a_broken_pod_is_named_though_the_first_one_still_answers():
    cause = Cause(reason="OOMKilled", message="pod demo-learner-2, container learner: ran out")
    broken = rank_pod(2, ready=False, cause=cause)
    found = learner_ready(rank_pod(0), rank_pod(1), broken, signals=signals())
    assert found == ("False", "OOMKilled", cause.message)


def test_deadlines_count_from_the_moment_when_every_pod_has_a_node():
    spec = make_run(learner={"replicas": 2}).spec
    worker = pod("w", node="a")
    one = ObservedState(pods=(rank_pod(0, node="a"), rank_pod(1), worker))
    assert status.with_clocks(RunStatus(), spec, one, None, 100.0).admission_s is None
    both = ObservedState(pods=(rank_pod(0, node="a"), rank_pod(1, node="b"), worker))
    assert status.with_clocks(RunStatus(), spec, both, None, 100.0).admission_s == 100.0
