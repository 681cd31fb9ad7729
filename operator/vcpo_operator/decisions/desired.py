"""The desired state of a run, from its spec, its lifecycle phase and the control decision. Pure."""

from dataclasses import dataclass
from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.api.cluster import UpgradePolicy
from vcpo.api.learner import Schedule
from vcpo.control.decision import ControlDecision
from vcpo_operator.children.family import build_children, checkpoint_claim
from vcpo_operator.children.manifest import Child, Parent
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The objects that a run should have, and the limits of its learner."""

    run: str
    owner_uid: str
    children: tuple[Child, ...]
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
    pending: str = ""


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


_UNTIL: Final = {
    UpgradePolicy.ON_RESTART: "the learner starts again",
    UpgradePolicy.NEVER: "an edit of the run replaces them",
}


def decide_revision(
    newest: Revision, kept: Revision | None, spec: VCPORunSpec, *, is_learner_down: bool
) -> tuple[Revision, str]:
    """Return the revision of a run's pods from now on, and why it is not the newest, in a sentence.

    newest: As this operator builds it from the spec.
    kept: The one in force; None when the run has no pods yet.
    is_learner_down: Whether the learner's pods end anyway, or are not there.
    """
    if kept is None:
        return newest, ""
    policy, is_same_but_for_steps = spec.upgrade_policy, _pods(kept) == _pods(newest)
    if is_same_but_for_steps and newest.steps == kept.steps:
        return newest, ""
    if is_same_but_for_steps and newest.steps > kept.steps and not _is_felt(spec):
        why = f"The learner takes the {kept.steps} steps that it was started for first."
        return (newest, "") if is_learner_down else (kept, why)
    is_same_spec = kept.generation == newest.generation or kept.spec == newest.spec
    is_edited = kept.keys != newest.keys or not is_same_spec
    is_upgrade_due = is_learner_down and policy is not UpgradePolicy.NEVER
    if is_edited or is_upgrade_due or policy is UpgradePolicy.RECREATE:
        return newest, ""
    return kept, (
        f"The operator builds other pods now; these stay until {_UNTIL[policy]} (`upgradePolicy`"
        f" '{policy}')."
    )


def _pods(revision: Revision) -> tuple[str, str]:
    return revision.base, revision.keys


def _is_felt(spec: VCPORunSpec) -> bool:
    return spec.optimizer.schedule is not Schedule.CONSTANT or any(
        group.noise is not None for group in spec.rollouts
    )
