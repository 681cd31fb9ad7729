"""Properties of every plan, for any run and any history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.operator.runs import DEFAULTS, FakeCluster, parent
from vcpo.control.decision import ControlDecision
from vcpo.control.scaling import Direction
from vcpo_operator.children import Kind
from vcpo_operator.decisions.actions import Apply
from vcpo_operator.decisions.desired import DesiredState, desired_state
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.decisions.plan import plan

_GROUP_NAMES = ("main", "extra", "eval")
_MAX_TURNS = 4
few = settings(max_examples=25)  # one example writes several run files, which is slow


@st.composite
def desired_states(draw: st.DrawFn) -> DesiredState:
    chosen = draw(st.lists(st.sampled_from(_GROUP_NAMES), min_size=1, unique=True))
    groups = [
        {
            "name": name,
            "minReplicas": draw(st.integers(0, 3)),
            "maxReplicas": 8,
            "scaling": draw(st.sampled_from(["Direct", "External"])),
        }
        for name in chosen
    ]
    phase = draw(st.sampled_from(list(LifecyclePhase)))
    replicas = {name: draw(st.integers(0, 8)) for name in chosen}
    decision = ControlDecision(
        lag_limit_steps=8,
        replicas=replicas,
        direction=Direction.HOLD,
        conditions=(),
        changes=(),
    )
    return desired_state(
        parent(rollouts=groups, pods={"disruptionBudgets": draw(st.booleans())}),
        DEFAULTS,
        RunVerdict(phase=phase),
        decision=decision if phase is LifecyclePhase.RUN else None,
    )


def settle(cluster: FakeCluster, desired: DesiredState) -> None:
    for _ in range(_MAX_TURNS):
        cluster.execute(plan(desired, cluster.observed, applied=cluster.applied))


@few
@given(st.lists(desired_states(), min_size=1, max_size=3))
def test_after_a_few_turns_nothing_is_left_to_do_and_a_group_that_rests_notes_what_it_had(history):
    cluster = FakeCluster()
    for desired in history:
        settle(cluster, desired)
        for group in cluster.observed.groups.values():
            assert (group.noted_replicas is not None) is desired.is_suspended
            assert group.replicas == 0 or not desired.is_suspended
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


@few
@given(st.lists(desired_states(), min_size=1, max_size=2))
def test_no_apply_ever_sets_the_replicas_of_a_deployment(history):
    cluster = FakeCluster()
    for desired in history:
        actions = plan(desired, cluster.observed, applied=cluster.applied)
        applied = [each.child for each in actions if isinstance(each, Apply)]
        deployments = [child for child in applied if child.kind is Kind.DEPLOYMENT]
        assert all("replicas" not in child.manifest["spec"] for child in deployments)
        settle(cluster, desired)


@few
@given(desired_states(), st.integers(0, 8))
def test_what_somebody_else_scales_is_never_scaled_back(desired, replicas):
    cluster = FakeCluster()
    settle(cluster, desired)
    others = [] if desired.is_suspended else set(cluster.observed.groups) - set(desired.replicas)
    for name in others:
        cluster.scale(cluster.observed.groups[name].child.name, replicas)
    settle(cluster, desired)
    assert all(cluster.observed.groups[name].replicas == replicas for name in others)


def state(cluster: FakeCluster) -> dict[str, object]:
    children = {(each.kind, each.name): each.digest for each in cluster.observed.children}
    groups = {name: (each.replicas, each.paused) for name, each in cluster.observed.groups.items()}
    return {"children": children, "groups": groups}
