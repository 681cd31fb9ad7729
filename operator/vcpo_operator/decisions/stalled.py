"""Unexplained: what does not get on although its own status gives no reason. Pure.

Two things are told in events only: why a StatefulSet cannot make its pod (a Deployment has a
condition for that), and why a kubelet cannot start one (a ConfigMap that is not there, say). Events
are many and belong to everybody, so they are neither watched nor kept: those about a few objects
are read, and only once these have not got on for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vcpo_operator.names import Role
from vcpo_operator.observed.records import Cause, ObservedPod, ObservedState

PATIENCE_S: Final = 10.0
"""Time for an ordinary start, before anybody asks why it takes so long."""
REREAD_S: Final = 30.0
"""Time between two questions; kubelets and controllers repeat themselves more seldom."""


def stalled_uids(observed: ObservedState) -> tuple[str, ...]:
    """Uids of the objects whose events may tell more: the learner's, and one worker's at most."""
    learner = observed.learner
    if learner is not None and learner.replicas > 0 and not _has_pods(observed, Role.LEARNER):
        return (learner.child.uid, *_being_made(observed, Role.ROLLOUT))
    return (*_being_made(observed, Role.LEARNER), *_being_made(observed, Role.ROLLOUT))


def with_event_causes(observed: ObservedState, causes: Mapping[str, Cause]) -> ObservedState:
    """The same with the causes that events gave, by uid of what they are about."""
    learner = observed.learner
    if learner is not None:
        learner = replace(learner, cause=causes.get(learner.child.uid))
    pods = tuple(_with_cause(pod, causes) for pod in observed.pods)
    return replace(observed, learner=learner, pods=pods)


def _with_cause(pod: ObservedPod, causes: Mapping[str, Cause]) -> ObservedPod:
    return replace(pod, cause=causes[pod.uid]) if pod.uid in causes else pod


def _has_pods(observed: ObservedState, role: Role) -> bool:
    return any(pod.role is role for pod in observed.pods)


def _being_made(observed: ObservedState, role: Role) -> tuple[str, ...]:
    pods = observed.pods_of(role)
    return tuple(pod.uid for pod in pods if pod.is_starting and pod.cause is None)[:1]
