"""The limits of a run: its deadlines, and the restarts of its learner. Pure.

The operator and the local host judge a run by these functions. The same run file therefore fails
for the same reason in a cluster and on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vcpo.api import VCPORunSpec


class LimitReason(StrEnum):
    """Which limit a run exceeded; also a reason of the condition `Failed`."""

    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The limits that a spec sets, in seconds; None is no limit."""

    pending_s: int | None
    """Time from the start to the admission."""
    startup_s: int
    """Time from the admission to the first step."""
    active_s: int | None
    """Time from the admission to the end."""
    max_learner_restarts: int
    """Restarts of the learner in a row without progress."""

    @classmethod
    def of(cls, spec: VCPORunSpec) -> RunLimits:
        return cls(
            pending_s=spec.pending_deadline_seconds,
            startup_s=spec.startup_deadline_seconds,
            active_s=spec.active_deadline_seconds,
            max_learner_restarts=spec.failure_policy.max_learner_restarts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """How far a run has come; all times are seconds of one clock."""

    start_s: float
    """Time at which the run was started, resumed or retried last."""
    admission_s: float | None
    """Time at which the learner and a worker had a place to run; None before. Processes have one at
    once."""
    has_stepped: bool
    """Whether an optimizer step was taken since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceededLimit:
    """The limit that ends a run."""

    reason: LimitReason
    message: str
    """One sentence that names the field of the spec."""


def exceeded_restarts(limits: RunLimits, failures: int) -> ExceededLimit | None:
    """Return the restart limit if the learner exceeded it, else None.

    failures: Failures of the learner in a row without progress (`FailureStreak.failures`).
    """
    allowed = limits.max_learner_restarts
    if failures <= allowed:
        return None
    message = (
        f"`spec.failurePolicy.maxLearnerRestarts`: the learner ended {failures} times in a row"
        f" without progress; {allowed} restarts are allowed."
    )
    return ExceededLimit(reason=LimitReason.BACKOFF_LIMIT_EXCEEDED, message=message)


def exceeded_deadline(limits: RunLimits, times: RunTimes, now_s: float) -> ExceededLimit | None:
    """Return the deadline that has passed at `now_s`; None while none has."""
    deadlines = _active_deadlines(limits, times)
    return next((exceeded for at_s, exceeded in deadlines if now_s >= at_s), None)


def next_deadline_s(limits: RunLimits, times: RunTimes) -> float | None:
    """Return the time of the earliest deadline; None while no deadline acts."""
    return min((at_s for at_s, _ in _active_deadlines(limits, times)), default=None)


def startup_deadline_s(limits: RunLimits, times: RunTimes) -> float | None:
    """Return the time at which a run without a step fails; None if that deadline does not act."""
    if times.admission_s is None or times.has_stepped:
        return None
    return times.admission_s + limits.startup_s


def _active_deadlines(limits: RunLimits, times: RunTimes) -> Iterator[tuple[float, ExceededLimit]]:
    """Yield the deadlines that act now; of two that have passed the first one counts."""

    def limit(reason: LimitReason, message: str) -> ExceededLimit:
        return ExceededLimit(reason=reason, message=message)

    if times.admission_s is None:
        if (pending_s := limits.pending_s) is not None:
            why = f"`spec.pendingDeadlineSeconds`: the pods had no node within {pending_s} s."
            yield times.start_s + pending_s, limit(LimitReason.PENDING_DEADLINE_EXCEEDED, why)
        return
    if (active_s := limits.active_s) is not None:
        why = f"`spec.activeDeadlineSeconds`: the run took {active_s} s or longer."
        yield times.admission_s + active_s, limit(LimitReason.DEADLINE_EXCEEDED, why)
    if (startup_s := startup_deadline_s(limits, times)) is not None:
        why = f"`spec.startupDeadlineSeconds`: the run took no step within {limits.startup_s} s."
        yield startup_s, limit(LimitReason.STARTUP_DEADLINE_EXCEEDED, why)
