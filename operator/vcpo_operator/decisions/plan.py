"""The plan: the actions that turn the observed state into the desired state, in order. Pure.

```
desired --.
observed -+--> plan --> (Apply, Delete, Throttle, ...)
applied --'
```
A plan depends on the observed state, not on earlier plans, so an interruption costs nothing.

A child is applied in three cases: its desired manifest changed (the digest), somebody changed it
(its version is later than that of our last apply), or the operator has restarted and knows no
versions yet. Objects are not compared field by field: the API server fills in defaults and rewrites
quantities, so they would always differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vcpo.control.signals import RunSignals
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.decisions.conflicts import Conflict, keep_size, name_conflict
from vcpo_operator.decisions.desired import DesiredState
from vcpo_operator.decisions.lifecycle import accepts_commands
from vcpo_operator.names import TEMPLATE_HASH_ANNOTATION, Role, certificates_name
from vcpo_operator.observed.records import ObservedChild, ObservedState


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply a child (server-side apply)."""

    child: Child
    force: bool
    """Take fields over from other managers; False for an object not yet known to be the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSecret:
    """Create the Secret of a run's keys or certificates, or renew its certificates."""

    child: Child
    renews: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeletionCost:
    """Annotate a pod with the trajectories that its deletion would lose."""

    pod: str
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object and what it owns; a pod's controller creates another one."""

    kind: Kind
    name: str
    uid: str
    """Only the object with this uid is deleted."""
    grace_s: int | None = None
    """Time that a pod has to end in order; None is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Set the learner's lag limit."""

    lag_limit_steps: int
    reason: str
    """A clause without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Tell the learner to hand out no more work, take what is in flight, save and end."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases:
    """Release the leases of a worker whose pod is gone."""

    worker: str


Action = Apply | IssueSecret | SetDeletionCost | Delete | Throttle | Drain | ReleaseLeases


_CRASHED_GRACE_S = 1
_SILENT_S = 15.0
"""A worker without a pod counts as gone after this time without contact. Before, its pod may be new
and not observed yet."""


def plan(
    desired: DesiredState,
    observed: ObservedState,
    *,
    applied: Mapping[str, int],
    signals: RunSignals | None = None,
) -> tuple[Action, ...]:
    """Return the actions that turn `observed` into `desired`."""
    if desired.drain_reason:
        command = (Drain(reason=desired.drain_reason),) if accepts_commands(signals) else ()
        return (*command, *_releases(observed, signals))
    # Pods of an attempt that is over go first, even if the API server refuses what follows.
    stale_pods = observed.pods_of(Role.LEARNER) if desired.restarts_learner else []
    return (
        *(Delete(kind=Kind.POD, name=pod.name, uid=pod.uid) for pod in stale_pods),
        *_group_replacements(desired, observed),
        *_throttle(desired, signals),
        *_applies(desired, observed, applied, signals),
        *_removals(desired, observed),
        *_pod_replacements(desired, observed),
        *_releases(observed, signals),
    )


def on_delete_actions(signals: RunSignals | None) -> tuple[Action, ...]:
    """Return the actions for a run that is being deleted; the garbage collector does the rest."""
    return (Drain(reason="the run is deleted"),) if accepts_commands(signals) else ()


def first_conflict(desired: DesiredState, observed: ObservedState) -> Conflict | None:
    """Return why a child cannot be applied now; None when each child can."""
    existing = (observed.child(child.kind, child.name) for child in desired.children)
    conflicts = (name_conflict(each, desired.owner_uid) for each in existing if each is not None)
    return next((each for each in conflicts if each is not None), None)


def _throttle(desired: DesiredState, signals: RunSignals | None) -> Iterator[Action]:
    wanted = desired.lag_limit_steps
    if wanted is None or signals is None or not signals.is_fresh:
        return
    if wanted != signals.lag_limit_steps:
        yield Throttle(lag_limit_steps=wanted, reason=desired.lag_reason)


def _applies(
    desired: DesiredState,
    observed: ObservedState,
    applied: Mapping[str, int],
    signals: RunSignals | None,
) -> Iterator[Action]:
    """Yield the children to create or change, up to the first conflict: later ones may need it."""
    for child in desired.children:
        existing = observed.child(child.kind, child.name)
        if existing is None:
            yield (
                IssueSecret(child=child)
                if child.kind is Kind.SECRET
                else Apply(child=child, force=False)
            )
            if child.kind is Kind.SECRET and child.name != certificates_name(desired.run):
                return  # the pod templates hold the uid of the keys, which is not known yet
            continue
        if name_conflict(existing, desired.owner_uid) is not None:
            return
        if existing.deleting:
            continue
        if child.kind is Kind.SECRET:
            if child.name == certificates_name(desired.run) and observed.certificates_due:
                yield IssueSecret(child=child, renews=True)
            continue
        wanted = _as_it_may_be(desired, child, observed)
        if _needs_apply(wanted, existing, applied):
            yield from _deletion_costs(wanted, observed, signals)
            yield Apply(child=wanted, force=True)


def _as_it_may_be(desired: DesiredState, child: Child, observed: ObservedState) -> Child:
    claim = observed.claims.get(child.name) if child.kind is Kind.CLAIM else None
    return child if claim is None else keep_size(child, claim, may_grow=desired.is_claim_size_set)


def _needs_apply(child: Child, existing: ObservedChild, applied: Mapping[str, int]) -> bool:
    known = applied.get(existing.uid)
    own_labels = child.manifest["metadata"]["labels"]
    if not own_labels.items() <= existing.labels.items():
        return True  # a change of labels alone does not count as one of kinds with a generation
    return existing.digest != child.digest or known is None or existing.version > known


def _deletion_costs(
    child: Child, observed: ObservedState, signals: RunSignals | None
) -> Iterator[Action]:
    """Yield the cost of each pod of a group that shrinks, so that the idlest worker goes first."""
    found = (each for each in observed.groups.values() if each.child.name == child.name)
    group = next(found, None) if child.kind is Kind.DEPLOYMENT else None
    if group is None or signals is None or child.manifest["spec"]["replicas"] >= group.replicas:
        return
    for pod in observed.pods_of(Role.ROLLOUT, group.group):
        worker = signals.workers.get(pod.name)
        cost = worker.in_flight if worker else 0
        if (pod.deletion_cost or 0) != cost:
            yield SetDeletionCost(pod=pod.name, cost=cost)


def _removals(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Yield the deletion of children that the run no longer wants.

    Workers finish their work in the grace period of their pods. The Secrets go with the run: the
    operator has no right to delete Secrets.
    """
    wanted = {(child.kind, child.name) for child in desired.children}
    for existing in observed.children:
        is_owned = existing.owner_uid == desired.owner_uid and existing.kind is not Kind.SECRET
        if is_owned and not existing.deleting and (existing.kind, existing.name) not in wanted:
            yield Delete(kind=existing.kind, name=existing.name, uid=existing.uid)


def _group_replacements(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Yield the learner's pods that go with another one of their group.

    If that one is on its way out in order, such as by an eviction, the others end in order too:
    together they still write a checkpoint. If it has crashed, they only wait for it.
    """
    if desired.restarts_learner:
        return
    is_orderly = any(pod.role is Role.LEARNER and pod.terminating for pod in observed.pods)
    for pod in observed.pods_of(Role.LEARNER):
        if pod.uid in desired.replaced_pods:
            grace_s = None if is_orderly else _CRASHED_GRACE_S
            yield Delete(kind=Kind.POD, name=pod.name, uid=pod.uid, grace_s=grace_s)


def _pod_replacements(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Yield the learner's pods of an older template, once its controller creates current ones."""
    child = next((each for each in desired.children if each.kind is Kind.STATEFUL_SET), None)
    existing = observed.learner
    if desired.restarts_learner or child is None or existing is None or not existing.is_up_to_date:
        return
    if existing.child.digest != child.digest or existing.replicas == 0:
        return
    annotations = child.manifest["spec"]["template"]["metadata"]["annotations"]
    for pod in observed.pods_of(Role.LEARNER):
        is_old = pod.template_digest != annotations[TEMPLATE_HASH_ANNOTATION]
        if is_old and pod.uid not in desired.replaced_pods:
            yield Delete(kind=Kind.POD, name=pod.name, uid=pod.uid)


def _releases(observed: ObservedState, signals: RunSignals | None) -> Iterator[Action]:
    """Yield the release of leases whose worker has no pod, before they expire."""
    if signals is None or not signals.is_fresh:
        return
    pods = {pod.name for pod in observed.pods}
    for name, worker in signals.workers.items():
        if worker.in_flight and worker.silent_s > _SILENT_S and name not in pods:
            yield ReleaseLeases(worker=name)
