"""Desired states, and their plans, for the tests of plans."""

from dataclasses import replace
from typing import Any

from tests.fixtures.operator.runs import DEFAULTS, KEY, UID, FakeCluster, names, parent, pod
from vcpo.api import VCPORun
from vcpo.control.decision import ControlDecision
from vcpo.control.limits import lag_change
from vcpo.control.scaling import Direction
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.desired import DesiredState, desired_state
from vcpo_operator.decisions.lifecycle import LearnerDrain, LifecyclePhase, RunVerdict
from vcpo_operator.decisions.plan import plan
from vcpo_operator.decisions.snapshot import Snapshot
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.observed.status import RunStatus

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


def snapshot_for(phase: LifecyclePhase, *, run: VCPORun, **changes: Any) -> Snapshot:
    return Snapshot(
        record=RunRecord(
            key=KEY, uid=UID, generation=1, resource_version=1, deleting=False, spec={}, status={}
        ),
        run=run,
        before=RunStatus(),
        verdict=RunVerdict(phase=phase),
        now_s=0.0,
        **{
            "current": RunStatus(),
            "observed": ObservedState(pods=(pod("demo-learner-0", Role.LEARNER),)),
            "signals": None,
            "draining": None,
            "is_new_attempt": False,
            **changes,
        },
    )


def desired_for(
    phase: LifecyclePhase = LifecyclePhase.RUN,
    decided: ControlDecision | None = None,
    *,
    draining: LearnerDrain | None = None,
    kept: Revision | None = None,
    generation: int = 1,
    **spec: Any,
) -> DesiredState:
    spec = {"rollouts": ROLLOUTS, **spec}
    if decided is None and phase is LifecyclePhase.RUN:
        decided = decision(**{group["name"]: group["minReplicas"] for group in spec["rollouts"]})
    built_from = replace(parent(**spec), generation=generation)
    snapshot = snapshot_for(phase, run=built_from.run, draining=draining)
    return desired_state(built_from, DEFAULTS, snapshot, decision=decided, kept=kept)


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
