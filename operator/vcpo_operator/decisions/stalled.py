"""Stalled objects: no progress, and their own status gives no reason. Pure.

Two causes are reported in events only: why a StatefulSet cannot create its pod (a Deployment has a
condition for that), and why a kubelet cannot start a pod (a missing ConfigMap, for example). Events
are many and belong to the whole namespace. The operator therefore does not watch them. It reads the
events of a few objects, and only after these made no progress for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vcpo_operator.names import Role
from vcpo_operator.observed.records import Cause, ObservedState

PATIENCE_S: Final = 10.0
"""Time that an ordinary start may take before events are read."""
REREAD_S: Final = 30.0
"""Time between two reads; kubelets and controllers repeat their events less often."""


def stalled_uids(observed: ObservedState) -> tuple[str, ...]:
    """Return the uids of objects whose events may name a cause: the learner and at most one worker.

    For the learner it is the StatefulSet while it lacks a pod, and the pod that starts after that.
    """
    learner = observed.learner
    num_learner_pods = sum(pod.role is Role.LEARNER for pod in observed.pods)
    if learner is not None and num_learner_pods < learner.replicas:
        return (learner.child.uid, *_starting_pod(observed, Role.ROLLOUT))
    return (*_starting_pod(observed, Role.LEARNER), *_starting_pod(observed, Role.ROLLOUT))


def with_event_causes(observed: ObservedState, causes: Mapping[str, Cause]) -> ObservedState:
    """Return the state with causes from events.

    causes: By uid of the object that the events are about.
    """
    learner = observed.learner
    if learner is not None:
        learner = replace(learner, cause=causes.get(learner.child.uid))
    pods = tuple(replace(pod, cause=causes.get(pod.uid, pod.cause)) for pod in observed.pods)
    return replace(observed, learner=learner, pods=pods)


def _starting_pod(observed: ObservedState, role: Role) -> tuple[str, ...]:
    """Return the uid of the first pod of a role that starts without a known cause of delay."""
    pods = observed.pods_of(role)
    return tuple(pod.uid for pod in pods if pod.is_starting and pod.cause is None)[:1]
