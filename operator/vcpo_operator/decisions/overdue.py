"""Pods that take too long to start: what they hold is given back. Pure.

A pod pulls its image from when it has its node, and its container loads the model from its start
until it answers. Both have a deadline (`pullDeadlineSeconds`, `loadDeadlineSeconds`). A run needs
every pod of its learner, and a worker. Where it has these, its overdue workers go, but for one of
each group: that one keeps trying, and until it starts the group does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vcpo.api import VCPORunSpec
from vcpo.control.run_limits import ExceededLimit, LimitReason
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedPod, ObservedState


def exceeded_by_pods(
    spec: VCPORunSpec, observed: ObservedState, now_s: float
) -> ExceededLimit | None:
    """Return the limit that ends the run, because the learner or no worker starts; else None."""
    learner = (overdue(pod, spec, now_s) for pod in observed.pods_of(Role.LEARNER))
    if (found := next(filter(None, learner), None)) is not None:
        return found
    workers = [overdue(pod, spec, now_s) for pod in observed.pods_of(Role.ROLLOUT)]
    return workers[0] if workers and None not in workers else None


def most_workers(spec: VCPORunSpec, observed: ObservedState, now_s: float) -> Mapping[str, int]:
    """Return how many workers a group may have because some are overdue, by its name."""
    found = {}
    for group in spec.rollouts:
        pods = observed.pods_of(Role.ROLLOUT, group.name)
        num_overdue = sum(overdue(pod, spec, now_s) is not None for pod in pods)
        if num_overdue:
            found[group.name] = len(pods) - num_overdue + 1
    return found


def overdue_workers(
    spec: VCPORunSpec, observed: ObservedState, now_s: float
) -> Iterator[ExceededLimit]:
    """Yield the limits that workers exceed."""
    for pod in observed.pods_of(Role.ROLLOUT):
        if (found := overdue(pod, spec, now_s)) is not None:
            yield found


def overdue(pod: ObservedPod, spec: VCPORunSpec, now_s: float) -> ExceededLimit | None:
    """Return which deadline a pod that starts has exceeded; None if it has not."""
    cause = "" if pod.cause is None else f" {pod.cause.reason}: {pod.cause.message}"
    name = pod.name
    deadlines = (
        (
            LimitReason.PULL_DEADLINE_EXCEEDED,
            pod.pulls_since_s,
            spec.pull_deadline_seconds,
            f"`spec.pullDeadlineSeconds`: pod {name} has a node, and no container of it started",
        ),
        (
            LimitReason.LOAD_DEADLINE_EXCEEDED,
            pod.loads_since_s,
            spec.load_deadline_seconds,
            f"`spec.loadDeadlineSeconds`: pod {name} did not download and load its model",
        ),
    )
    for reason, since_s, limit_s, what in deadlines:
        if since_s is not None and now_s >= since_s + limit_s:
            return ExceededLimit(reason=reason, message=f"{what} within {limit_s} s.{cause}")
    return None
