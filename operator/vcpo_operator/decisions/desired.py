"""The desired state of a run, from its spec, its lifecycle phase and the control decision. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vcpo.control import ControlDecision
from vcpo.spec.cluster import Scaling
from vcpo.spec.workloads import Cleanup
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.family import build_children
from vcpo_operator.children.manifest import Child, Kind, Parent
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import (
    LifecyclePhase,
    RunVerdict,
    cleanup,
    is_suspended,
)
from vcpo_operator.names import rollout_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The objects that a run should have, and the limits of its learner."""

    run: str
    """Name of the run."""
    owner_uid: str
    children: tuple[Child, ...]
    """In the order in which they are created."""
    is_claim_size_set: bool = False
    """Whether the run says how large the volume for its checkpoints is."""
    paused: Mapping[str, Child] = field(default_factory=dict)
    """Deployments as they are created, by name: paused, so that they have no pods yet."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Replicas that a group's new Deployment starts with, by group."""
    scaler_seeds: Mapping[str, int] = field(default_factory=dict)
    """Replicas that the scaler of a group without workers starts with, by group."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Replicas of the groups that the operator scales now; others are not touched."""
    replaced_pods: tuple[str, ...] = ()
    """Uids of the learner's pods that go because another one of their group has ended."""
    restarts_learner: bool = False
    """Whether the learner's pods belong to an attempt that is over, whatever their template."""
    drain_removed: bool = True
    """Whether groups that left the spec finish their work before they are deleted."""
    draining: LearnerDrain | None = None
    """How the learner ends before its workers are removed; None: it does not end."""
    admission_lag_steps: int | None = None
    """Admission lag of the learner; None leaves it as it is."""
    lag_reason: str = ""
    """Why the admission lag is what it is: a clause for the learner's event and log."""


def desired_state(
    parent: Parent,
    defaults: OperatorDefaults,
    verdict: RunVerdict,
    *,
    decision: ControlDecision | None,
    requested: Mapping[str, int],
    draining: LearnerDrain | None = None,
    replaced_pods: tuple[str, ...] = (),
    restarts_learner: bool = False,
) -> DesiredState:
    """Return what the run should have.

    decision: None while the control loop does not run: the run is suspended or has ended.
    requested: Workers that autoscalers request, by name of the scaler.
    draining: How the learner ends; None when it does not.
    replaced_pods: Uids of the learner's pods that go because one of their group has ended.
    restarts_learner: Whether the learner's pods belong to an attempt that is over.
    Raises: ValueError when a user's template cannot be merged.
    """
    spec = parent.run.spec
    removed, suspended = cleanup(spec, verdict), is_suspended(spec, verdict)
    children = build_children(
        parent,
        defaults,
        with_learner=removed is not Cleanup.DELETE_WORKLOADS,
        with_rollouts=removed is Cleanup.RETAIN_WORKLOADS,
        running=not suspended,
    )
    names = {child.name for child in children if child.kind is Kind.DEPLOYMENT}
    paused = (
        rollout_deployment(parent, group, defaults, paused=True)
        for group in spec.rollouts
        if rollout_name(parent.name, group.name) in names
    )
    no_workers = {group.name: 0 for group in spec.rollouts}
    decided: Mapping[str, int] = {} if decision is None else decision.replicas
    seeds = {group.name: decided.get(group.name, group.min_replicas) for group in spec.rollouts}
    return DesiredState(
        run=parent.name,
        owner_uid=parent.owner.uid,
        children=children,
        is_claim_size_set=spec.learner.checkpoint_storage_gibibytes is not None,
        paused={child.name: child for child in paused},
        seeds=no_workers if suspended else {**seeds, **_external_replicas(parent, requested)},
        # Never 0: that disables a HorizontalPodAutoscaler.
        scaler_seeds={
            group.name: max(1, group.min_replicas)
            for group in spec.rollouts
            if group.scaling is Scaling.EXTERNAL
        },
        replicas=no_workers if suspended else _replicas(parent, decision, requested),
        replaced_pods=replaced_pods if verdict.phase is LifecyclePhase.RUN else (),
        restarts_learner=restarts_learner,
        drain_removed=not verdict.has_ended,
        draining=draining,
        admission_lag_steps=None if decision is None else decision.admission_lag_steps,
        lag_reason="" if decision is None else decision.lag_reason,
    )


def _replicas(
    parent: Parent, decision: ControlDecision | None, requested: Mapping[str, int]
) -> dict[str, int]:
    """Return the replicas of the groups that are scaled now."""
    if decision is None:
        return {}
    direct = {
        group.name: decision.replicas[group.name]
        for group in parent.run.spec.rollouts
        if group.scaling is Scaling.DIRECT
    }
    return {**direct, **_external_replicas(parent, requested)}


def _external_replicas(parent: Parent, requested: Mapping[str, int]) -> dict[str, int]:
    """Return the replicas that autoscalers request, within the bounds of each group."""
    external = (group for group in parent.run.spec.rollouts if group.scaling is Scaling.EXTERNAL)
    scalers = {rollout_name(parent.name, group.name): group for group in external}
    return {
        group.name: min(max(requested[scaler], group.min_replicas), group.max_replicas)
        for scaler, group in scalers.items()
        if scaler in requested
    }
