"""The desired state of a run, from its spec, its lifecycle phase and the control decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.control.decision import ControlDecision
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.family import build_children, checkpoint_claim
from vcpo_operator.children.manifest import Child, Parent
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.snapshot import Snapshot
from vcpo_operator.decisions.upgrade import decide_revision


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
    replaced_pods: tuple[str, ...] = ()
    """Uids of the learner's pods that go because another one of their group has ended."""
    restarts_learner: bool = False
    """Whether the learner's pods belong to an attempt that is over, whatever their template."""
    drain_reason: str = ""
    """Why the learner ends before its workers are removed; empty: it does not, or has ended."""
    lag_limit_steps: int | None = None
    """Lag limit of the learner; None leaves it as it is."""
    lag_reason: str = ""
    """Why the lag limit is what it is: a clause for the learner's event and log."""
    revision: Revision | None = None
    """What the pods are made of; None if the run has ended."""
    pending: str = ""
    """Why the pods are not of the newest revision, in a sentence; empty when they are."""


def desired_state(
    parent: Parent,
    defaults: OperatorDefaults,
    snapshot: Snapshot,
    *,
    decision: ControlDecision | None,
    kept: Revision | None,
) -> DesiredState:
    """Return what the run should have.

    decision: None while the control loop does not run: the run is suspended or has ended.
    kept: The revision of the pods that the run has; None when it has none.
    Raises: ValueError when a user's template cannot be merged.
    """
    verdict, draining = snapshot.verdict, snapshot.draining
    revision, pending = None, ""
    if verdict.has_ended:
        children: tuple[Child, ...] = (checkpoint_claim(parent),)
    else:
        replicas = None if decision is None else decision.replicas
        running = decision is not None
        children = build_children(parent, defaults, replicas=replicas, running=running)
        newest, spec = Revision.of(parent, children), parent.run.spec
        revision, pending = decide_revision(
            newest, kept, spec, is_learner_down=snapshot.is_learner_down
        )
        children = tuple(map(revision.apply_to, children))
    return DesiredState(
        run=parent.name,
        owner_uid=parent.owner.uid,
        children=children,
        is_claim_size_set=parent.run.spec.learner.checkpoint_storage_gibibytes is not None,
        replaced_pods=snapshot.current.learner.replaced if decision is not None else (),
        restarts_learner=snapshot.is_new_attempt,
        drain_reason=draining.reason if draining is not None and draining.until_s else "",
        lag_limit_steps=None if decision is None else decision.lag_limit_steps,
        lag_reason="" if decision is None else decision.lag_reason,
        revision=revision,
        pending=pending,
    )
