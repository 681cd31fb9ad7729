"""Desired states, and their plans, for the tests of plans."""

from __future__ import annotations

from typing import Any

from tests.fixtures.operator.runs import DEFAULTS, FakeCluster, names, parent
from vcpo.control.decision import ControlDecision
from vcpo.control.limits import lag_change
from vcpo.control.scaling import Direction
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.desired import DesiredState, desired_state
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.decisions.plan import plan

ROLLOUTS = [{"name": "main", "minReplicas": 2, "maxReplicas": 6}]


def decision(lag: int = 8, **replicas: int) -> ControlDecision:
    return ControlDecision(
        lag_limit_steps=lag,
        replicas=replicas,
        direction=Direction.HOLD,
        conditions=(),
        changes=(),
        last_lag_change=lag_change(before=12, after=lag, reason="because", decided_s=0.0),
    )


def desired_for(
    phase: LifecyclePhase = LifecyclePhase.RUN,
    decided: ControlDecision | None = None,
    *,
    draining: LearnerDrain | None = None,
    kept: Revision | None = None,
    **spec: Any,
) -> DesiredState:
    spec = {"rollouts": ROLLOUTS, **spec}
    if decided is None and phase is LifecyclePhase.RUN:
        decided = decision(**{group["name"]: group["minReplicas"] for group in spec["rollouts"]})
    return desired_state(
        parent(**spec),
        DEFAULTS,
        RunVerdict(phase=phase),
        decision=decided,
        draining=draining,
        kept=kept,
    )


def settled_cluster(state: DesiredState) -> FakeCluster:
    """A cluster whose objects are those of a desired state."""
    cluster = FakeCluster()
    for _ in range(2):  # the rest follows on the keys
        cluster.execute(plan(state, cluster.observed, applied=cluster.applied))
    return cluster


def with_keys() -> FakeCluster:
    """A cluster in which a run has its certificates and keys, and nothing else yet."""
    cluster = FakeCluster()
    cluster.execute(plan(desired_for(), cluster.observed, applied=cluster.applied))
    return cluster


def plan_names(state: DesiredState, cluster: FakeCluster, **options: Any) -> list[str]:
    return names(plan(state, cluster.observed, applied=cluster.applied, **options))
