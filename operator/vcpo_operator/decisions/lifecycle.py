r"""The course of a run: whether it runs, rests or has ended, and when to look again. Pure.

```
            suspend: true
     RUN <-----------------> SUSPEND
      | ^
      | `-- an edit -- FAILED      a deadline, too many restarts, or the learner says so
      v
   COMPLETE                        the learner says so
```
COMPLETE is for ever, and FAILED until the spec is edited, a suspension aside. Both are recorded in
the status before anything is cleaned up, so that an operator which dies in between finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vcpo.service.crash import crash_cause
from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Cleanup
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.observed.pod_causes import redact_and_shorten
from vcpo_operator.observed.report import LearnerReport

_LONGEST_CAUSE = 600
"""Characters of a crash's cause in a message; the status holds the end of the log."""


class LifecyclePhase(StrEnum):
    """Where a run is headed."""

    RUN = "run"
    SUSPEND = "suspend"
    COMPLETE = "complete"
    FAILED = "failed"


class FailureReason(StrEnum):
    """Why a run failed; reasons of the condition `Failed`."""

    LEARNER_FAILED = "LearnerFailed"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """A course with its reason."""

    phase: LifecyclePhase
    reason: str = ""
    """One word; empty while the run runs or rests."""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self.phase in {LifecyclePhase.COMPLETE, LifecyclePhase.FAILED}


def judge(
    spec: VCPORunSpec, status: RunStatus, report: LearnerReport | None, now_s: float
) -> RunVerdict:
    """Judge the course.

    status: with the learner's restarts counted and the clocks begun, if it has started.
    report: the learner's newest report, however old; None when there is none.
    now_s: Unix time.
    """
    recorded = _recorded(status)
    if recorded is not None:
        return recorded
    if report is not None and report.phase is RunPhase.COMPLETE:
        reason = "WithoutUpdate" if report.has_never_updated else "Succeeded"
        message = f"All {spec.steps} steps are taken. {report.no_update}".rstrip()
        return RunVerdict(phase=LifecyclePhase.COMPLETE, reason=reason, message=message)
    if report is not None and report.phase is RunPhase.FAILED:
        message = report.failure or "The learner gave up; its journal on the volume says why."
        return _failure(FailureReason.LEARNER_FAILED, message)
    if spec.suspend:
        return RunVerdict(phase=LifecyclePhase.SUSPEND)
    return _limits(spec, status, now_s) or RunVerdict(phase=LifecyclePhase.RUN)


def starts_new_attempt(spec: VCPORunSpec, status: RunStatus, generation: int) -> bool:
    """Whether a failed run starts anew: its spec was edited since the last look, and lets it run.

    status: as the last look left it.
    """
    edited = generation > status.observed_generation
    return status.holds("Failed") and edited and not spec.suspend


def next_deadline_s(spec: VCPORunSpec, status: RunStatus, verdict: RunVerdict) -> float | None:
    """Unix time at which the course changes if nothing else happens; None when never."""
    if verdict.has_ended:
        ttl_s = spec.ttl_seconds_after_finished
        if ttl_s is None or status.completion_s is None:
            return None
        return status.completion_s + ttl_s
    if verdict.phase is LifecyclePhase.SUSPEND or status.start_s is None:
        return None
    if status.admission_s is None:
        limit_s = spec.pending_deadline_seconds
        return None if limit_s is None else status.start_s + limit_s
    limits_s = [spec.active_deadline_seconds]
    if status.first_step_s is None:
        limits_s.append(spec.startup_deadline_seconds)
    deadlines = [status.admission_s + limit_s for limit_s in limits_s if limit_s is not None]
    return min(deadlines, default=None)


def is_past_time_to_live(spec: VCPORunSpec, status: RunStatus, now_s: float) -> bool:
    """Whether an ended run's time to live is over."""
    ttl_s = spec.ttl_seconds_after_finished
    if ttl_s is None or status.completion_s is None or _recorded(status) is None:
        return False
    return now_s >= status.completion_s + ttl_s


def cleanup(spec: VCPORunSpec, verdict: RunVerdict) -> Cleanup:
    """What the clean-up policy removes now; nothing while the run goes on."""
    match verdict.phase:
        case LifecyclePhase.COMPLETE:
            return spec.cleanup_policy.on_complete
        case LifecyclePhase.FAILED:
            return spec.cleanup_policy.on_failed
        case _:
            return Cleanup.RETAIN_WORKLOADS


def is_suspended(spec: VCPORunSpec, verdict: RunVerdict) -> bool:
    """Whether nothing is to run now: on request, whatever has become of the run."""
    return verdict.phase is LifecyclePhase.SUSPEND or (verdict.has_ended and spec.suspend)


def _recorded(status: RunStatus) -> RunVerdict | None:
    for kind, course in (("Complete", LifecyclePhase.COMPLETE), ("Failed", LifecyclePhase.FAILED)):
        condition = status.condition(kind)
        if condition is not None and condition.status == "True":
            return RunVerdict(phase=course, reason=condition.reason, message=condition.message)
    return None


def _limits(spec: VCPORunSpec, status: RunStatus, now_s: float) -> RunVerdict | None:
    allowed = spec.failure_policy.max_learner_restarts
    failures = status.restarts.streak.failures
    if failures > allowed:
        message = f"The learner ended {failures} times in a row without progress; {allowed} are"
        message += " allowed."
        return _failure(FailureReason.BACKOFF_LIMIT_EXCEEDED, f"{message}{_last_words(status)}")
    if status.admission_s is None:
        return _pending_limit(spec, status, now_s)
    elapsed_s = now_s - status.admission_s
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and elapsed_s >= limit_s:
        message = f"`spec.activeDeadlineSeconds`: the run took {limit_s} s or longer."
        return _failure(FailureReason.DEADLINE_EXCEEDED, f"{message}{_hindrance(status)}")
    limit_s = spec.startup_deadline_seconds
    if status.first_step_s is None and elapsed_s >= limit_s:
        message = f"`spec.startupDeadlineSeconds`: no step within {limit_s} s."
        return _failure(FailureReason.STARTUP_DEADLINE_EXCEEDED, f"{message}{_hindrance(status)}")
    return None


def _pending_limit(spec: VCPORunSpec, status: RunStatus, now_s: float) -> RunVerdict | None:
    limit_s = spec.pending_deadline_seconds
    if limit_s is None or status.start_s is None or now_s - status.start_s < limit_s:
        return None
    message = f"`spec.pendingDeadlineSeconds`: not placed within {limit_s} s."
    return _failure(FailureReason.PENDING_DEADLINE_EXCEEDED, f"{message}{_hindrance(status)}")


def _last_words(status: RunStatus) -> str:
    """How the learner ended last, as the end of a message; empty when that is not known."""
    end = status.last_end
    if end is None:
        return ""
    cause = redact_and_shorten(crash_cause(end.message), _LONGEST_CAUSE)
    told = f": {cause}" if cause else "."
    return f" The last time with exit code {end.exit_code} ({end.reason}){told}"


def _hindrance(status: RunStatus) -> str:
    """What was in the way at the last look, as the end of a message: it is cleaned up next."""
    for kind in ("LearnerReady", "RolloutsReady"):
        condition = status.condition(kind)
        if condition is not None and condition.status == "False":
            return f" {kind} ({condition.reason}): {condition.message}"
    return _last_words(status)


def _failure(reason: FailureReason, message: str) -> RunVerdict:
    return RunVerdict(phase=LifecyclePhase.FAILED, reason=reason.value, message=message)
