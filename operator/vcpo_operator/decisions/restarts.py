"""Restarts of the learner, and the pods that must start again because one of them has. Pure.

```
pods start --> all are there, rank 0 answers: they are a group
                      |
                      v  a container of the group ends, or a pod of it goes
               every pod of the group is deleted; the StatefulSet creates all of them anew
```
Ranks that have lost one cannot continue, and may wait for it until their timeout. A pod that starts
alone could meet the old ranks. So the pods of a group end together, and start again from the last
checkpoint. A learner of one pod needs none of this: its container restarts by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.control.supervision import FailureStreak
from vcpo.service.lifecycle import RANK_LOST
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedPod, ObservedState
from vcpo_operator.observed.status import ContainerEnd, CountedPod, LearnerStatus, RunStatus


def with_restarts(status: RunStatus, observed: ObservedState, *, num_pods: int) -> RunStatus:
    """Return the status with the learner's restarts counted, and how it ended last."""
    pods = observed.pods_of(Role.LEARNER)
    if not pods and num_pods == 1:
        return status
    learner = with_pods(status.learner, pods, num_pods=num_pods, step=status.step or 0)
    return status.but(learner=learner)


def with_pods(
    learner: LearnerStatus, pods: Sequence[ObservedPod], *, num_pods: int, step: int
) -> LearnerStatus:
    """Return the record with the restarts of the learner's pods up to now.

    step: The last known optimizer step; progress is a step beyond the furthest one before.
    """
    fresh = _new_restarts(learner, pods)
    num_restarts = max(fresh.values(), default=0)
    streak = FailureStreak(failures=learner.failures, progress=learner.furthest_step)
    for _ in range(num_restarts):
        streak = streak.after_failure(step)
    is_broken = any(uid not in fresh or fresh[uid] for uid in learner.group)
    going = learner.group if is_broken else learner.replaced
    replaced = tuple(uid for uid in going if uid in fresh)
    group = () if is_broken else learner.group
    if not (is_broken or group or replaced) and num_pods > 1:
        group = _uids_that_met(pods, num_pods)
    if num_pods == 1:  # a message may come later than the restart
        ends = [pod.last_end for pod in pods if pod.last_end is not None]
    else:
        ends = [pod.last_end for pod in pods if fresh[pod.uid] and pod.last_end is not None]
    return learner.but(
        restarts=learner.restarts + num_restarts,
        counted=tuple(CountedPod(uid=pod.uid, restarts=pod.restarts) for pod in pods),
        group=group,
        replaced=replaced,
        failures=streak.failures,
        furthest_step=streak.progress,
        last_end=min(ends, key=_rank, default=learner.last_end),
    )


def _new_restarts(learner: LearnerStatus, pods: Sequence[ObservedPod]) -> dict[str, int]:
    known = {each.uid: each.restarts for each in learner.counted}
    new = {pod.uid: max(0, pod.restarts - known.get(pod.uid, 0)) for pod in pods}
    # A pod that is deleted with its group may lose its ranks before it goes.
    return {uid: 0 if uid in learner.replaced else count for uid, count in new.items()}


def _uids_that_met(pods: Sequence[ObservedPod], num_pods: int) -> tuple[str, ...]:
    is_led = any(pod.index == 0 and pod.ready for pod in pods)
    return tuple(pod.uid for pod in pods) if is_led and len(pods) == num_pods else ()


def _rank(end: ContainerEnd) -> tuple[bool, float, str]:
    return end.exit_code == RANK_LOST, end.end_s or 0.0, end.pod
