"""The limits of a run and of its processes: deadlines, restarts, failures, silence. Pure.

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


def exceeded_restarts(spec: VCPORunSpec, failures: int) -> ExceededLimit | None:
    """Return the restart limit if the learner exceeded it, else None.

    failures: Failures of the learner in a row without progress (`FailureStreak.failures`).
    """
    allowed = spec.failure_policy.max_learner_restarts
    if failures <= allowed:
        return None
    message = (
        f"`spec.failurePolicy.maxLearnerRestarts`: the learner ended {failures} times in a row"
        f" without progress; {allowed} restarts are allowed."
    )
    return ExceededLimit(reason=LimitReason.BACKOFF_LIMIT_EXCEEDED, message=message)


def exceeded_deadline(spec: VCPORunSpec, times: RunTimes, now_s: float) -> ExceededLimit | None:
    """Return the deadline that has passed at `now_s`; None while none has."""
    deadlines = _active_deadlines(spec, times)
    return next((exceeded for at_s, exceeded in deadlines if now_s >= at_s), None)


def next_deadline_s(spec: VCPORunSpec, times: RunTimes) -> float | None:
    """Return the time of the earliest deadline; None while no deadline acts."""
    return min((at_s for at_s, _ in _active_deadlines(spec, times)), default=None)


def startup_deadline_s(spec: VCPORunSpec, times: RunTimes) -> float | None:
    """Return the time at which a run without a step fails; None if that deadline does not act."""
    if times.admission_s is None or times.has_stepped:
        return None
    return times.admission_s + spec.startup_deadline_seconds


def _active_deadlines(spec: VCPORunSpec, times: RunTimes) -> Iterator[tuple[float, ExceededLimit]]:
    """Yield the deadlines that act now; of two that have passed the first one counts."""

    def limit(reason: LimitReason, message: str) -> ExceededLimit:
        return ExceededLimit(reason=reason, message=message)

    if times.admission_s is None:
        if (pending_s := spec.pending_deadline_seconds) is not None:
            why = f"`spec.pendingDeadlineSeconds`: the pods had no node within {pending_s} s."
            yield times.start_s + pending_s, limit(LimitReason.PENDING_DEADLINE_EXCEEDED, why)
        return
    if (active_s := spec.active_deadline_seconds) is not None:
        why = f"`spec.activeDeadlineSeconds`: the run took {active_s} s or longer."
        yield times.admission_s + active_s, limit(LimitReason.DEADLINE_EXCEEDED, why)
    if (startup_s := startup_deadline_s(spec, times)) is not None:
        within = f"within {spec.startup_deadline_seconds} s"
        why = f"`spec.startupDeadlineSeconds`: the run took no step {within}."
        yield startup_s, limit(LimitReason.STARTUP_DEADLINE_EXCEEDED, why)


SILENCE_DEADLINE_S = 60.0
"""Seconds without an answer after which a process is hung; the pods' liveness probes agree."""

MAX_WORKER_FAILURES = 5
"""Number of workers in a row that end before they submit anything, after which the run fails; it
does not fail while another worker that has submitted is running."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStreak:
    """Number of failures in a row without progress between them.

    Only progress ends a streak. Time does not: a process that starts for minutes and then dies
    crash-loops just like a process that dies after a second.
    """

    failures: int = 0
    progress: int = 0
    """Largest progress at any failure so far, such as steps taken. Work that is repeated after a
    failure, such as steps since the checkpoint, is no progress."""

    def after_failure(self, progress: int) -> FailureStreak:
        """Return the streak after one more failure.

        progress: the largest progress reached by now, in the unit of the field.
        """
        if progress > self.progress:
            return FailureStreak(failures=1, progress=progress)
        return FailureStreak(failures=self.failures + 1, progress=self.progress)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: 0, then 1, 2, 4 and so on up to 60."""
        if self.failures <= 1:
            return 0.0
        # The exponent is bounded, because a long streak would overflow a float.
        doublings = min(self.failures - 2, 16)
        return min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)


def is_hung(*, silent_s: float, has_started: bool, startup_deadline_s: float) -> bool:
    """Return whether a process is hung and should be killed.

    silent_s: seconds since the first unanswered health check.
    has_started: whether the process has reported that it serves. Before that it may still load a
        model, and `startup_deadline_s` applies.
    """
    return silent_s >= (SILENCE_DEADLINE_S if has_started else startup_deadline_s)
