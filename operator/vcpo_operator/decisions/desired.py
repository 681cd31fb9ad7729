"""What a run should have, from its spec, its course and the control loop's decision. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vcpo.control import ControlDecision
from vcpo.spec.cluster import Scaling
from vcpo.spec.workloads import Cleanup
from vcpo_operator.children.family import OperatorDefaults, build_children
from vcpo_operator.children.manifest import Kind, Parent
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import RunVerdict, cleanup, is_suspended
from vcpo_operator.decisions.plan import DesiredState
from vcpo_operator.names import rollout_name


def desired_state(
    parent: Parent,
    defaults: OperatorDefaults,
    verdict: RunVerdict,
    *,
    decision: ControlDecision | None,
    asked: Mapping[str, int],
    draining: LearnerDrain | None = None,
    restarts_learner: bool = False,
) -> DesiredState:
    """Say what should be.

    decision: None while nothing is steered: the run rests or has ended.
    asked: Workers that autoscalers ask for, by the name of the scaler that says so.
    draining: The learner's end in good order; None when it need not end.
    restarts_learner: Whether its pods are of an attempt that is over.
    Raises: ValueError when a user's template cannot be merged.
    """
    removed = cleanup(parent.run.spec, verdict)
    wanted = build_children(
        parent,
        defaults,
        with_learner=removed is not Cleanup.DELETE_WORKLOADS,
        with_rollouts=removed is Cleanup.RETAIN_WORKLOADS,
        running=not is_suspended(parent.run.spec, verdict),
    )
    names = {child.name for child in wanted if child.kind is Kind.DEPLOYMENT}
    paused = (
        rollout_deployment(parent, group, default_image=defaults.rollout_image, paused=True)
        for group in parent.run.spec.rollouts
        if rollout_name(parent.name, group.name) in names
    )
    return DesiredState(
        run=parent.name,
        owner_uid=parent.owner.uid,
        children=wanted,
        paused={child.name: child for child in paused},
        seeds=_seeds(parent, verdict, decision, asked),
        scaler_seeds=_scaler_seeds(parent),
        replicas=_replicas(parent, verdict, decision, asked),
        restarts_learner=restarts_learner,
        drain_removed=not verdict.has_ended,
        draining=draining,
        admission_lag_steps=None if decision is None else decision.admission_lag_steps,
        reason="" if decision is None else "; ".join(decision.reasons),
    )


def _seeds(
    parent: Parent, verdict: RunVerdict, decision: ControlDecision | None, asked: Mapping[str, int]
) -> dict[str, int]:
    groups = parent.run.spec.rollouts
    if is_suspended(parent.run.spec, verdict):
        return {group.name: 0 for group in groups}
    decided: Mapping[str, int] = {} if decision is None else decision.replicas
    least = {group.name: decided.get(group.name, group.min_replicas) for group in groups}
    return {**least, **_external(parent, asked)}


def _scaler_seeds(parent: Parent) -> dict[str, int]:
    """The least, but never 0: that switches a HorizontalPodAutoscaler off."""
    return {
        group.name: max(1, group.min_replicas)
        for group in parent.run.spec.rollouts
        if group.scaling is Scaling.EXTERNAL
    }


def _replicas(
    parent: Parent, verdict: RunVerdict, decision: ControlDecision | None, asked: Mapping[str, int]
) -> dict[str, int]:
    groups = parent.run.spec.rollouts
    if is_suspended(parent.run.spec, verdict):
        return {group.name: 0 for group in groups}
    if decision is None:
        return {}
    direct = {
        group.name: decision.replicas[group.name]
        for group in groups
        if group.scaling is Scaling.DIRECT
    }
    return {**direct, **_external(parent, asked)}


def _external(parent: Parent, asked: Mapping[str, int]) -> dict[str, int]:
    """Workers of the groups that autoscalers scale, within the run's bounds."""
    outside = (group for group in parent.run.spec.rollouts if group.scaling is Scaling.EXTERNAL)
    scalers = {rollout_name(parent.name, group.name): group for group in outside}
    return {
        group.name: min(max(asked[scaler], group.min_replicas), group.max_replicas)
        for scaler, group in scalers.items()
        if scaler in asked
    }
