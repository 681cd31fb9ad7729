"""Thresholds of the control loop, bounds of the replicas, and changes of a limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api.workloads import RolloutGroup

STARVED_IDLE_RATIO: Final = 0.3
"""Share of its time above which a learner that waits for data counts as starved."""
SATURATED_IDLE_RATIO: Final = 0.02
"""Share of its time below which a learner that waits for data counts as saturated."""
SIGNALS_MAX_AGE_S: Final = 60.0
"""Age above which signals change neither lag limit nor number of workers."""


def fit_replicas(groups: Sequence[RolloutGroup], replicas: Mapping[str, int]) -> dict[str, int]:
    """Return the replicas of every group within its bounds; a missing group gets its minimum.

    If there would be no worker at all, the first group gets one: a run without workers never
    ends, and its starvation is invisible because it takes no step that would measure it.
    """
    fitted = {group.name: group.clamp(replicas.get(group.name, 0)) for group in groups}
    if not any(fitted.values()):
        fitted[groups[0].name] = 1
    return fitted


class ChangeKind(StrEnum):
    """Kind of a change; also the reason of the event that reports it."""

    THROTTLED = "Throttled"
    RELAXED = "Relaxed"
    SCALED = "Scaled"
    """A rollout group has more or fewer workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """One change of a limit."""

    kind: ChangeKind
    before: int
    after: int
    """Policy versions of the lag limit, or workers of the group."""
    reason: str
    """Why, with the measured number: a clause without a full stop."""
    decided_s: float
    """Time of the decision, on the clock of the decisions."""
    group: str = ""

    @property
    def sentence(self) -> str:
        """The change and its reason, for people."""
        if self.kind is ChangeKind.SCALED:
            change = f"Rollout group '{self.group}' {self.before} -> {self.after} workers"
            return f"{change}: {self.reason}."
        return lag_change_sentence(self.before, self.after, self.reason)


def lag_change(*, before: int, after: int, reason: str, decided_s: float) -> LimitChange:
    """Return a change of the lag limit, in policy versions."""
    return LimitChange(
        kind=lag_change_kind(before, after),
        before=before,
        after=after,
        reason=reason,
        decided_s=decided_s,
    )


def lag_change_kind(before: int, after: int) -> ChangeKind:
    """Return whether a lag limit fell or rose."""
    return ChangeKind.THROTTLED if after < before else ChangeKind.RELAXED


def lag_change_sentence(before: int, after: int, reason: str) -> str:
    """Return a change of the lag limit in a sentence.

    reason: a clause without a full stop; empty if it is not known.
    """
    change = f"Lag limit {before} -> {after} versions"
    return f"{change}: {reason}." if reason else f"{change}."


def warning_reason(level: WarningLevel, score: float | None, step: int) -> str:
    """Return the reason of a change that an early warning caused, as a clause."""
    known = "" if score is None else f" (score {score:.2f})"
    return f"early warning {level}{known} at step {step}"
