"""Properties of every plan, for any run and any history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.operator.runs import FakeCluster
from tests.unit.operator.decisions.plans import decision, desired_for
from vcpo_operator.decisions.desired import DesiredState
from vcpo_operator.decisions.lifecycle import LifecyclePhase
from vcpo_operator.decisions.plan import plan

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
