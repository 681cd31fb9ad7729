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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from vcpo.control.supervision import FailureStreak
from vcpo.service.lifecycle import RANK_LOST
from vcpo_operator.observed.records import ContainerEnd, ObservedPod


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPod:
    """A pod, and how many of its restarts are counted already."""

    uid: str
    restarts: int

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry of `status.learner.followers`."""
        return cls(uid=entry["uid"], restarts=int(entry.get("restarts", 0)))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `status.learner.followers`."""
        return {"uid": self.uid, "restarts": self.restarts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Restarts of the learner, over all its pods.

    Each pod counts its own restarts. The record holds how many restarts of which pod are counted
    already. Counting again then adds nothing, and a new pod counts from zero. A replaced pod is no
    restart. Restarts of several pods at once are one restart of the learner.
    """

    total: int = 0
    pod_uid: str = ""
    pod_restarts: int = 0
    """Restarts of the first pod, in which rank 0 is, that are counted already."""
    followers: tuple[CountedPod, ...] = ()
    """The other pods."""
    group: tuple[str, ...] = ()
    """Uids of the pods that train together; empty until all have met, and for a single pod."""
    replaced: tuple[str, ...] = ()
    """Uids of the pods that still have to be deleted, because one of their group has ended."""
    streak: FailureStreak = field(default_factory=FailureStreak)
    """Restarts in a row without progress; `failurePolicy.maxLearnerRestarts` limits these."""

    @classmethod
    def from_dict(cls, learner: Mapping[str, Any]) -> Self:
        """Read the restarts in `status.learner`."""
        return cls(
            total=int(learner.get("restarts", 0)),
            pod_uid=learner.get("podUid", ""),
            pod_restarts=int(learner.get("podRestarts", 0)),
            followers=tuple(map(CountedPod.from_dict, learner.get("followers") or ())),
            group=tuple(learner.get("group") or ()),
            replaced=tuple(learner.get("replaced") or ()),
            streak=FailureStreak(
                failures=int(learner.get("restartsInARow", 0)),
                progress=int(learner.get("furthestStep", 0)),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the restarts' fields of `status.learner`."""
        return {
            "restarts": self.total,
            "podUid": self.pod_uid or None,
            "podRestarts": self.pod_restarts,
            "followers": [each.to_dict() for each in self.followers] or None,
            "group": list(self.group) or None,
            "replaced": list(self.replaced) or None,
            "restartsInARow": self.streak.failures,
            "furthestStep": self.streak.progress,
        }

    def with_pods(self, pods: Sequence[ObservedPod], *, num_pods: int, step: int) -> Restarts:
        """Return the count with the restarts of the pods up to now.

        pods: Those of the learner that do not terminate.
        num_pods: How many the spec asks for.
        step: The last known optimizer step; progress is a step beyond the furthest one before.
        """
        fresh = self._new_restarts(pods)
        streak, num_restarts = self.streak, max(fresh.values(), default=0)
        for _ in range(num_restarts):
            streak = streak.after_failure(step)
        living = {pod.uid for pod in pods}
        is_broken = any(uid not in living or fresh.get(uid) for uid in self.group)
        kept = self.group if is_broken else self.replaced
        counted = replace(
            self._counting(pods),
            total=self.total + num_restarts,
            replaced=tuple(uid for uid in kept if uid in living),
            streak=streak,
        )
        return replace(counted, group=() if is_broken else counted._uids_that_met(pods, num_pods))

    def ends_now(self, pods: Sequence[ObservedPod]) -> list[ContainerEnd]:
        """Return the ends of containers that are not counted yet, the cause of the others first."""
        fresh = self._new_restarts(pods)
        ends = [pod.last_end for pod in pods if fresh[pod.uid] and pod.last_end is not None]
        return sorted(ends, key=lambda end: (end.exit_code == RANK_LOST, end.time, end.pod))

    def _new_restarts(self, pods: Sequence[ObservedPod]) -> dict[str, int]:
        """Return the restarts of each pod that are not counted yet, by uid."""
        known = {self.pod_uid: self.pod_restarts}
        known |= {each.uid: each.restarts for each in self.followers}
        new = {pod.uid: max(0, pod.restarts - known.get(pod.uid, 0)) for pod in pods}
        # A pod that is deleted with its group may lose its ranks before it goes.
        return {uid: 0 if uid in self.replaced else count for uid, count in new.items()}

    def _counting(self, pods: Sequence[ObservedPod]) -> Restarts:
        """Return the record of which restarts of which pods are counted."""
        counted = self
        for pod in pods:
            if pod.index == 0:
                known = self.pod_restarts if pod.uid == self.pod_uid else 0
                most = max(known, pod.restarts)
                counted = replace(counted, pod_uid=pod.uid, pod_restarts=most)
        others = [pod for pod in pods if pod.index > 0]
        known_of = {each.uid: each.restarts for each in self.followers}
        followers = (
            CountedPod(uid=pod.uid, restarts=max(pod.restarts, known_of.get(pod.uid, 0)))
            for pod in others
        )
        return replace(counted, followers=tuple(followers))

    def _uids_that_met(self, pods: Sequence[ObservedPod], num_pods: int) -> tuple[str, ...]:
        """Return the uids of the group; rank 0 answers only once it has met all others."""
        if self.group or num_pods == 1 or self.replaced:
            return self.group
        is_led = any(pod.index == 0 and pod.ready for pod in pods)
        return tuple(pod.uid for pod in pods) if is_led and len(pods) == num_pods else ()
