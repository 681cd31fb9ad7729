"""The plan: from what is wanted and what is there to the exact actions, in order. Pure.

```
desired ------.
observed --+--> plan --> (Apply, Scale, ..., DeleteRun)
applied ---'
```
Planned again after everything was carried out it is empty, and a plan cut short anywhere is
continued by the next one: each action is derived from what is there, none from what was planned.

A child is applied when the wish has changed (its digest), when somebody touched it since (its
version is beyond the one that our last apply left), and once after a start of the operator, which
knows no versions then. Objects are never compared field by field: the API server fills in defaults
and rewrites quantities, and would seem to differ for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteChild,
    DeletePod,
    Drain,
    IssueToken,
    ReleaseLeases,
    ReportScale,
    Scale,
    SeedScaler,
    SetDeletionCost,
    Throttle,
)
from vcpo_operator.decisions.conflicts import (
    Conflict,
    is_ours,
    keep_claim_size,
    name_conflict,
    storage_class_conflict,
)
from vcpo_operator.decisions.draining import LearnerDrain, accepts_commands
from vcpo_operator.names import TEMPLATE_HASH_ANNOTATION, Role, rollout_name, selector
from vcpo_operator.observed.records import (
    ObservedChild,
    ObservedClaim,
    ObservedGroup,
    ObservedState,
)
from vcpo_operator.observed.report import LearnerReport

_PAUSED_REPLICAS = 1
"""What the API server gives a Deployment that says nothing of its replicas."""
_SILENT_S = 15.0
"""A worker without a pod is given up when it was not heard of for this long; before, the pod may be
new and not seen yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """What should be."""

    run: str
    owner_uid: str
    children: tuple[Child, ...]
    """In the order in which they are made."""
    paused: Mapping[str, Child] = field(default_factory=dict)
    """Deployments as they are created, by name: without pods, to be scaled and released."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Replicas that a group's new Deployment starts with."""
    scaler_seeds: Mapping[str, int] = field(default_factory=dict)
    """What the scaler of a group without workers starts with."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Replicas of the groups that the operator scales now; nobody else's are touched."""
    restarts_learner: bool = False
    """Whether the learner's pods, whatever their template, are of an attempt that is over."""
    drain_removed: bool = True
    """Whether groups that left the spec first finish what they do."""
    draining: LearnerDrain | None = None
    """The learner's end in good order, before its workers go; None: it should not end."""
    admission_lag_steps: int | None = None
    """Lag bound for new work; None leaves the learner's alone."""
    reason: str = ""
    """Why the limits move, for the learner's journal."""


def plan(
    desired: DesiredState,
    observed: ObservedState,
    *,
    applied: Mapping[str, int],
    report: LearnerReport | None = None,
) -> tuple[Action, ...]:
    """Plan what turns `observed` into `desired`.

    applied: Version that each child had after this process applied it, by uid.
    """
    if desired.draining is not None and desired.draining.until_s is not None:
        return (*_drain(desired.draining, report), *_releases(observed, report))
    return (
        *_leftovers(desired, observed),
        *_throttle(desired, report),
        *_applies(desired, observed, applied),
        *_scales(desired, observed, report),
        *_reports(desired, observed),
        *_removals(desired, observed),
        *_replacements(desired, observed),
        *_releases(observed, report),
    )


def first_conflict(desired: DesiredState, observed: ObservedState) -> Conflict | None:
    """Why some child cannot be made now; None when each can."""
    conflicts = (_conflict(desired, child, observed) for child in desired.children)
    return next((each for each in conflicts if each is not None), None)


def _conflict(desired: DesiredState, child: Child, observed: ObservedState) -> Conflict | None:
    there = observed.child(child.kind, child.name)
    if there is None:
        return None
    claim = _claim(child, observed)
    of_name = name_conflict(there, desired.owner_uid)
    return of_name if of_name is not None or claim is None else storage_class_conflict(child, claim)


def _claim(child: Child, observed: ObservedState) -> ObservedClaim | None:
    return observed.claims.get(child.name) if child.kind is Kind.CLAIM else None


def _leftovers(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Learner's pods of an attempt that is over; first of all, whatever is refused later."""
    if desired.restarts_learner:
        for pod in observed.pods_of(Role.LEARNER):
            yield DeletePod(name=pod.name, uid=pod.uid)


def _throttle(desired: DesiredState, report: LearnerReport | None) -> Iterator[Action]:
    wanted = desired.admission_lag_steps
    if wanted is None or report is None or not report.is_fresh:
        return
    if wanted != report.signals.admission_lag_steps:
        yield Throttle(admission_lag_steps=wanted, reason=desired.reason)


def on_delete_actions(report: LearnerReport | None) -> tuple[Action, ...]:
    """Plan what is left to do for a run that is being deleted: its pods go whatever we do."""
    return (Drain(reason="the run is deleted"),) if accepts_commands(report) else ()


def _drain(draining: LearnerDrain, report: LearnerReport | None) -> Iterator[Action]:
    """Until the learner says that it drains."""
    if accepts_commands(report):
        yield Drain(reason=draining.reason)


def _applies(
    desired: DesiredState, observed: ObservedState, applied: Mapping[str, int]
) -> Iterator[Action]:
    """What is to be made or changed, up to the first conflict: what follows may stand on it."""
    groups = {rollout_name(desired.run, name): name for name in desired.seeds}
    for child in desired.children:
        there = observed.child(child.kind, child.name)
        if _conflict(desired, child, observed) is not None:
            return
        if there is not None and there.deleting:
            continue
        if child.kind is Kind.SECRET:
            if there is None:
                yield IssueToken(child=child)
                return  # pods are made from its uid, which is not known yet
            continue
        if child.kind is Kind.DEPLOYMENT:
            name = groups[child.name]
            yield from _deployment(desired, child, name, observed.groups.get(name), applied)
        elif there is None and child.kind is Kind.SCALER:
            yield from _scaler(desired, child, observed)
        else:
            claim = _claim(child, observed)
            made = child if claim is None else keep_claim_size(child, claim)
            if there is None or _needs_apply(made, there, applied):
                yield Apply(child=made, force=there is not None)


def _deployment(
    desired: DesiredState,
    child: Child,
    group: str,
    there: ObservedGroup | None,
    applied: Mapping[str, int],
) -> Iterator[Action]:
    seed = desired.seeds[group]
    if there is None and seed == _PAUSED_REPLICAS:
        yield Apply(child=child, force=False)
    elif there is None:
        yield Apply(child=desired.paused[child.name], force=False)
        yield Scale(name=child.name, replicas=seed)
        yield Apply(child=child, force=True)
    elif there.paused and there.child.digest == desired.paused[child.name].digest:
        if there.replicas != seed:
            yield Scale(name=child.name, replicas=seed)
        yield Apply(child=child, force=True)
    elif _needs_apply(child, there.child, applied):
        yield Apply(child=child, force=True)


def _scaler(desired: DesiredState, child: Child, observed: ObservedState) -> Iterator[Action]:
    """An autoscaler goes on from the workers there are; a group at rest starts anew."""
    group = child.manifest["spec"]["group"]
    there = observed.groups.get(group)
    live = 0 if there is None or there.paused else there.replicas
    yield SeedScaler(child=child, replicas=live or desired.scaler_seeds[group])
    yield Apply(child=child, force=False)


def _needs_apply(child: Child, there: ObservedChild, applied: Mapping[str, int]) -> bool:
    known = applied.get(there.uid)
    return there.digest != child.digest or known is None or there.version > known


def _scales(
    desired: DesiredState, observed: ObservedState, report: LearnerReport | None
) -> Iterator[Action]:
    for name, wanted in desired.replicas.items():
        there = observed.groups.get(name)
        if there is None or there.paused or there.child.deleting or there.replicas == wanted:
            continue
        if not is_ours(there.child, desired.owner_uid):
            continue
        if wanted < there.replicas:
            yield from _costs(name, observed, report)
        yield Scale(name=there.child.name, replicas=wanted)


def _reports(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """What the scalers of this desired should tell and do not."""
    for child in desired.children:
        there = observed.scalers.get(child.name) if child.kind is Kind.SCALER else None
        if there is None or there.child.deleting:
            continue
        group = child.manifest["spec"]["group"]
        workers = observed.groups.get(group)
        current = workers.current if workers else 0
        labels = selector(desired.run, Role.ROLLOUT, group)
        text = ",".join(f"{key}={value}" for key, value in labels.items())
        if (there.reported_replicas, there.reported_selector) != (current, text):
            yield ReportScale(name=child.name, uid=there.child.uid, replicas=current, selector=text)


def _costs(group: str, observed: ObservedState, report: LearnerReport | None) -> Iterator[Action]:
    """Before a removal, make the emptiest worker the cheapest to lose."""
    if report is None:
        return
    for pod in observed.pods_of(Role.ROLLOUT, group):
        worker = report.workers.get(pod.name)
        cost = worker.in_flight if worker else 0
        if (pod.deletion_cost or 0) != cost:
            yield SetDeletionCost(pod=pod.name, cost=cost)


def _removals(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    wanted = {(child.kind, child.name) for child in desired.children}
    for there in observed.children:
        # The token's Secret goes with the run: the operator may not delete Secrets.
        ours = there.owner_uid == desired.owner_uid and there.kind is not Kind.SECRET
        if not ours or there.deleting or (there.kind, there.name) in wanted:
            continue
        leaving = _group_of(observed, there)
        if desired.drain_removed and leaving is not None and leaving.replicas > 0:
            yield Scale(name=there.name, replicas=0)
        elif not (desired.drain_removed and leaving is not None and leaving.current > 0):
            yield DeleteChild(kind=there.kind, name=there.name, uid=there.uid)


def _group_of(observed: ObservedState, there: ObservedChild) -> ObservedGroup | None:
    found = (each for each in observed.groups.values() if each.child.uid == there.uid)
    return next(found, None)


def _replacements(desired: DesiredState, observed: ObservedState) -> Iterator[Action]:
    """Learner's pods of an older template, once its controller makes pods of the current one."""
    child = next((each for each in desired.children if each.kind is Kind.STATEFUL_SET), None)
    there = observed.learner
    if desired.restarts_learner or child is None or there is None or not there.settled:
        return
    if there.child.digest != child.digest or there.replicas == 0:
        return
    annotations = child.manifest["spec"]["template"]["metadata"]["annotations"]
    for pod in observed.pods_of(Role.LEARNER):
        if pod.template_digest != annotations[TEMPLATE_HASH_ANNOTATION]:
            yield DeletePod(name=pod.name, uid=pod.uid)


def _releases(observed: ObservedState, report: LearnerReport | None) -> Iterator[Action]:
    """Leases of workers whose pod is gone, so that their prompts need not wait to expire."""
    if report is None or not report.is_fresh:
        return
    pods = {pod.name for pod in observed.pods}
    for name, worker in report.workers.items():
        if worker.in_flight and worker.silent_s > _SILENT_S and name not in pods:
            yield ReleaseLeases(worker=name)
