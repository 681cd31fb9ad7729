"""The plan: the actions that turn the observed state into the desired state, in order. Pure.

```
desired --.
observed -+--> plan --> (Apply, Scale, ..., DeleteRun)
applied --'
```
A plan depends on the observed state, not on earlier plans. So the plan after all actions were
executed is empty, and after an interruption the next plan does the rest.

A child is applied in three cases: its desired manifest changed (the digest), somebody changed it
(its version is later than that of our last apply), or the operator has restarted and knows no
versions yet. Objects are not compared field by field: the API server fills in defaults and rewrites
quantities, so they would always differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vcpo.control.signals import RunSignals
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteChild,
    DeletePod,
    Drain,
    IssueCertificates,
    IssueKeys,
    ReleaseLeases,
    Resume,
    Scale,
    SetDeletionCost,
    Suspend,
    Throttle,
)
from vcpo_operator.decisions.conflicts import (
    Conflict,
    access_mode_conflict,
    is_ours,
    keep_claim,
    name_conflict,
    storage_class_conflict,
)
from vcpo_operator.decisions.desired import DesiredState
from vcpo_operator.decisions.draining import accepts_commands
from vcpo_operator.names import (
    ROLE_LABEL,
    TEMPLATE_HASH_ANNOTATION,
    Role,
    certificates_name,
    rollout_name,
)
from vcpo_operator.observed.records import (
    ObservedChild,
    ObservedClaim,
    ObservedGroup,
    ObservedState,
)

_DEFAULT_REPLICAS = 1
"""Replicas that the API server gives a Deployment that names none."""
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
    """Return the actions that turn `observed` into `desired`.

    applied: Version that each child had after this process applied it, by uid.
    """
    drain = desired.draining
    if drain is not None and drain.until_s is not None:
        command = (Drain(reason=drain.reason),) if accepts_commands(signals) else ()
        return (*command, *_releases(observed, signals))
    # Pods of an attempt that is over go first, even if the API server refuses what follows.
    stale_pods = observed.pods_of(Role.LEARNER) if desired.restarts_learner else []
    return (
        *(DeletePod(name=pod.name, uid=pod.uid) for pod in stale_pods),
        *_group_replacements(desired, observed),
        *_throttle(desired, signals),
        *_applies(desired, observed, applied),
        *_scales(desired, observed, signals),
        *_removals(desired, observed),
        *_pod_replacements(desired, observed),
        *_releases(observed, signals),
    )


def on_delete_actions(signals: RunSignals | None) -> tuple[Action, ...]:
    """Return the actions for a run that is being deleted; the garbage collector does the rest."""
    return (Drain(reason="the run is deleted"),) if accepts_commands(signals) else ()


def first_conflict(desired: DesiredState, observed: ObservedState) -> Conflict | None:
    """Return why a child cannot be applied now; None when each child can."""
    conflicts = (_conflict(desired, child, observed) for child in desired.children)
    return next((each for each in conflicts if each is not None), None)


def _conflict(desired: DesiredState, child: Child, observed: ObservedState) -> Conflict | None:
    existing = observed.child(child.kind, child.name)
    if existing is None:
        return None
    claim = _claim(child, observed)
    conflict = name_conflict(existing, desired.owner_uid)
    if conflict is not None or claim is None:
        return conflict
    return storage_class_conflict(child, claim) or access_mode_conflict(child, claim)


def _claim(child: Child, observed: ObservedState) -> ObservedClaim | None:
    is_for_checkpoints = child.kind is Kind.CLAIM and not _is_made_once(child)
    return observed.claims.get(child.name) if is_for_checkpoints else None


def _is_made_once(child: Child) -> bool:
    """Whether a child never changes: the Job that downloads the model, and the claim for it."""
    return bool(child.manifest["metadata"]["labels"].get(ROLE_LABEL) == Role.MODEL)


def _throttle(desired: DesiredState, signals: RunSignals | None) -> Iterator[Action]:
    wanted = desired.lag_limit_steps
    if wanted is None or signals is None or not signals.is_fresh:
        return
    if wanted != signals.lag_limit_steps:
        yield Throttle(lag_limit_steps=wanted, reason=desired.lag_reason)


def _applies(
    desired: DesiredState, observed: ObservedState, applied: Mapping[str, int]
) -> Iterator[Action]:
    """Yield the children to create or change, up to the first conflict: later ones may need it."""
    groups = {rollout_name(desired.run, name): name for name in desired.seeds}
    for child in desired.children:
        existing = observed.child(child.kind, child.name)
        if _conflict(desired, child, observed) is not None:
            return
        if existing is not None and existing.deleting:
            continue
        if existing is not None and _is_made_once(child):
            if child.kind is Kind.JOB and desired.repeats_download:
                yield DeleteChild(kind=child.kind, name=child.name, uid=existing.uid)
            continue
        if child.kind is Kind.SECRET:
            issue = _issue(desired, child, existing, due=observed.certificates_due)
            yield from issue
            if any(isinstance(action, IssueKeys) for action in issue):
                return  # the pod templates hold its uid, which is not known yet
            continue
        if child.kind is Kind.DEPLOYMENT:
            group = groups[child.name]
            yield from _deployment(desired, child, group, observed.groups.get(group), applied)
        else:
            claim = _claim(child, observed)
            is_size_set = desired.is_claim_size_set
            wanted = child if claim is None else keep_claim(child, claim, is_size_set=is_size_set)
            if existing is None or _needs_apply(wanted, existing, applied):
                yield Apply(child=wanted, force=existing is not None)


def _issue(
    desired: DesiredState, child: Child, existing: ObservedChild | None, *, due: bool
) -> list[Action]:
    """Return what makes a Secret's content, or renews it.

    due: whether the certificates end soon.
    """
    if child.name == certificates_name(desired.run):
        wanted = IssueCertificates(child=child, renews=existing is not None)
        return [wanted] if existing is None or due else []
    return [IssueKeys(child=child)] if existing is None else []


def _deployment(
    desired: DesiredState,
    child: Child,
    group: str,
    existing: ObservedGroup | None,
    applied: Mapping[str, int],
) -> Iterator[Action]:
    """Yield a Deployment's applies: a new one is created paused, scaled, and then released."""
    seed = desired.seeds[group]
    if existing is None and seed == _DEFAULT_REPLICAS:
        yield Apply(child=child, force=False)
    elif existing is None:
        yield Apply(child=desired.paused[child.name], force=False)
        yield Scale(name=child.name, replicas=seed)
        yield Apply(child=child, force=True)
    elif existing.paused and existing.child.digest == desired.paused[child.name].digest:
        if existing.replicas != seed:
            yield Scale(name=child.name, replicas=seed)
        yield Apply(child=child, force=True)
    elif _needs_apply(child, existing.child, applied):
        yield Apply(child=child, force=True)


def _needs_apply(child: Child, existing: ObservedChild, applied: Mapping[str, int]) -> bool:
    known = applied.get(existing.uid)
    own_labels = child.manifest["metadata"]["labels"]
    if not own_labels.items() <= existing.labels.items():
        return True  # a change of labels alone does not count as one of kinds with a generation
    return existing.digest != child.digest or known is None or existing.version > known


def _scales(
    desired: DesiredState, observed: ObservedState, signals: RunSignals | None
) -> Iterator[Action]:
    """Yield the scaling of the run's Deployments, with deletion costs before a scale-down."""
    for name in desired.seeds:
        existing = observed.groups.get(name)
        if existing is None or existing.paused or existing.child.deleting:
            continue
        action = _scaling(desired, existing)
        if action is None or not is_ours(existing.child, desired.owner_uid):
            continue
        if isinstance(action, Scale) and action.replicas < existing.replicas:
            yield from _deletion_costs(name, observed, signals)
        yield action


def _scaling(desired: DesiredState, existing: ObservedGroup) -> Scale | Suspend | Resume | None:
    """Return what changes the number of a group's workers; None leaves it to others, or as it is.

    A suspended group has a note of the number that it had. So a number of zero without the note is
    what an autoscaler or a person wants, and stays.
    """
    name, noted = existing.child.name, existing.noted_replicas
    if desired.is_suspended:
        if noted is not None and existing.replicas == 0:
            return None
        return Suspend(name=name, noted_replicas=existing.replicas if noted is None else noted)
    wanted = desired.replicas.get(existing.group)
    if noted is not None:
        resumed = max(noted, desired.seeds[existing.group]) if wanted is None else wanted
        version = existing.resource_version
        return Resume(name=name, replicas=resumed, resource_version=version)
    return None if wanted in {None, existing.replicas} else Scale(name=name, replicas=wanted)


def _deletion_costs(
    group: str, observed: ObservedState, signals: RunSignals | None
) -> Iterator[Action]:
    """Yield the cost of each pod of a group, so that the idlest worker is removed first."""
    if signals is None:
        return
    for pod in observed.pods_of(Role.ROLLOUT, group):
        worker = signals.workers.get(pod.name)
        cost = worker.in_flight if worker else 0
        if (pod.deletion_cost or 0) != cost:
            yield SetDeletionCost(pod=pod.name, cost=cost)


def _removals(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Yield the deletion of children that the run no longer wants.

    A group that left the spec is scaled to zero first, so that its workers finish their work. The
    Secret of keys goes with the run: the operator has no right to delete Secrets.
    """
    wanted = {(child.kind, child.name) for child in desired.children}
    groups = {group.child.uid: group for group in observed.groups.values()}
    for existing in observed.children:
        is_owned = existing.owner_uid == desired.owner_uid and existing.kind is not Kind.SECRET
        if not is_owned or existing.deleting or (existing.kind, existing.name) in wanted:
            continue
        group = groups.get(existing.uid) if desired.drain_removed else None
        if group is not None and group.replicas > 0:
            yield Scale(name=existing.name, replicas=0)
        elif group is None or group.current == 0:
            yield DeleteChild(kind=existing.kind, name=existing.name, uid=existing.uid)


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
            yield DeletePod(name=pod.name, uid=pod.uid, grace_s=grace_s)


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
            yield DeletePod(name=pod.name, uid=pod.uid)


def _releases(observed: ObservedState, signals: RunSignals | None) -> Iterator[Action]:
    """Yield the release of leases whose worker has no pod, before they expire."""
    if signals is None or not signals.is_fresh:
        return
    pods = {pod.name for pod in observed.pods}
    for name, worker in signals.workers.items():
        if worker.in_flight and worker.silent_s > _SILENT_S and name not in pods:
            yield ReleaseLeases(worker=name)
