"""The desired state of a run, from its spec, its lifecycle phase and the control decision. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vcpo.api.cluster import Scaling
from vcpo.api.workloads import Cleanup
from vcpo.control.decision import ControlDecision
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.family import build_children
from vcpo_operator.children.manifest import Child, Kind, Parent
from vcpo_operator.children.revision import Revision
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import (
    LifecyclePhase,
    RunVerdict,
    cleanup,
    is_suspended,
)
from vcpo_operator.decisions.upgrade import RevisionDecision, decide_revision
from vcpo_operator.names import rollout_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The objects that a run should have, and the limits of its learner."""

    run: str
    """Name of the run."""
    owner_uid: str
    children: tuple[Child, ...]
    """Objects of the run, in the order in which they are created."""
    is_claim_size_set: bool = False
    """Whether the run says how large the volume for its checkpoints is."""
    paused: Mapping[str, Child] = field(default_factory=dict)
    """Deployments as they are created, by name: paused, so that they have no pods yet."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Replicas that a group's new Deployment starts with, and a suspended one at least comes back
    with, by group."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Replicas of the groups that the operator scales now; others are not touched."""
    is_suspended: bool = False
    """Whether no group has workers now, whoever scales it."""
    replaced_pods: tuple[str, ...] = ()
    """Uids of the learner's pods that go because another one of their group has ended."""
    restarts_learner: bool = False
    """Whether the learner's pods belong to an attempt that is over, whatever their template."""
    repeats_download: bool = False
    """Whether the Job that downloads the model failed in an attempt that is over."""
    drain_removed: bool = True
    """Whether groups that left the spec finish their work before they are deleted."""
    draining: LearnerDrain | None = None
    """How the learner ends before its workers are removed; None: it does not end."""
    lag_limit_steps: int | None = None
    """Lag limit of the learner; None leaves it as it is."""
    lag_reason: str = ""
    """Why the lag limit is what it is: a clause for the learner's event and log."""
    revision: RevisionDecision | None = None
    """What the pods are made of; None if the run has ended."""


def desired_state(
    parent: Parent,
    defaults: OperatorDefaults,
    verdict: RunVerdict,
    *,
    decision: ControlDecision | None,
    draining: LearnerDrain | None = None,
    replaced_pods: tuple[str, ...] = (),
    restarts_learner: bool = False,
    kept: Revision | None = None,
    is_learner_down: bool = False,
    lends_workers_back: bool = False,
    awaits_model: bool = False,
    repeats_download: bool = False,
    has_turn: bool = False,
) -> DesiredState:
    """Return what the run should have.

    decision: None while the control loop does not run: the run is suspended or has ended.
    draining: How the learner ends; None when it does not.
    replaced_pods: Uids of the learner's pods that go because one of their group has ended.
    restarts_learner: Whether the learner's pods belong to an attempt that is over.
    kept: The revision of the pods that the run has; None when it has none.
    is_learner_down, has_turn: As for `decide_revision`.
    lends_workers_back: Whether there are no workers now, because the learner cannot start.
    awaits_model: Whether there are no pods but the one that downloads the model.
    repeats_download: Whether the Job that does so failed in an attempt that is over.
    Raises: ValueError when a user's template cannot be merged.
    """
    spec = parent.run.spec
    removed, suspended = cleanup(spec, verdict), is_suspended(spec, verdict)
    children = build_children(
        parent,
        defaults,
        with_learner=removed is not Cleanup.DELETE_WORKLOADS,
        with_rollouts=removed is Cleanup.RETAIN_WORKLOADS,
        running=not suspended and not awaits_model,
    )
    paused: Iterable[Child] = _paused(parent, defaults, children)
    newest, revision = Revision.of(parent, children), None
    in_force = kept or newest  # a run that has ended starts no other pods
    if newest is not None and not verdict.has_ended:
        revision = decide_revision(
            newest, kept, spec, is_learner_down=is_learner_down, has_turn=has_turn
        )
        in_force = revision.revision
    if in_force is not None:
        children = tuple(map(in_force.apply_to, children))
        paused = map(in_force.apply_to, paused)
    rests = suspended or lends_workers_back or awaits_model
    no_workers = {group.name: 0 for group in spec.rollouts}
    replicas = {} if decision is None else _decided_replicas(parent, decision)
    return DesiredState(
        run=parent.name,
        owner_uid=parent.owner.uid,
        children=children,
        is_claim_size_set=spec.learner.checkpoint_storage_gibibytes is not None,
        paused={child.name: child for child in paused},
        seeds=no_workers if rests else {**_least_replicas(parent), **replicas},
        replicas=replicas,
        is_suspended=rests,
        replaced_pods=replaced_pods if verdict.phase is LifecyclePhase.RUN else (),
        restarts_learner=restarts_learner,
        repeats_download=repeats_download,
        drain_removed=not verdict.has_ended,
        draining=draining,
        lag_limit_steps=None if decision is None else decision.lag_limit_steps,
        lag_reason="" if decision is None else decision.lag_reason,
        revision=revision,
    )


def _paused(
    parent: Parent, defaults: OperatorDefaults, children: Iterable[Child]
) -> tuple[Child, ...]:
    """Return the Deployments among the children as they are while the run is paused."""
    names = {child.name for child in children if child.kind is Kind.DEPLOYMENT}
    return tuple(
        rollout_deployment(parent, group, defaults, paused=True)
        for group in parent.run.spec.rollouts
        if rollout_name(parent.name, group.name) in names
    )


def _decided_replicas(parent: Parent, decision: ControlDecision) -> dict[str, int]:
    """Return the replicas of the groups that the operator scales."""
    return {
        group.name: decision.replicas[group.name]
        for group in parent.run.spec.rollouts
        if group.scaling is Scaling.DIRECT
    }


def _least_replicas(parent: Parent) -> dict[str, int]:
    """Return the least replicas of each group.

    Never 0 where others scale: a HorizontalPodAutoscaler does nothing at 0.
    """
    return {
        group.name: max(group.min_replicas, 1 if group.scaling is Scaling.EXTERNAL else 0)
        for group in parent.run.spec.rollouts
    }
