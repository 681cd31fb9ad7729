r"""The lifecycle of a run: whether it runs, is suspended or has ended. Pure.

```
            suspend: true
     RUN <-----------------> SUSPEND
      | ^
      | `-- an edit -- FAILED      a limit is exceeded, or the learner reports a failure
      v
   COMPLETE                        the learner reports the last step
```
COMPLETE is final. FAILED lasts until the user edits the spec; suspending is not such an edit. The
operator writes both to the status before it cleans up. An operator that dies in between finds them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo import judgement
from vcpo.api import VCPORunSpec
from vcpo.control import run_limits
from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.control.run_limits import RunTimes, exceeded_deadline, exceeded_restarts
from vcpo.control.signals import RunSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.observed.pod_causes import redact_and_shorten
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.status import RunStatus

COLLAPSED: Final = "Collapsed"
"""Reason of a run that took all its steps, and whose reward collapsed and did not recover."""
_MAX_CAUSE_CHARACTERS = 600
"""Length of a crash's cause in a message; the status holds the end of the log."""


class LifecyclePhase(StrEnum):
    """What the operator does with a run."""

    RUN = "run"
    SUSPEND = "suspend"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """A lifecycle phase with its reason."""

    phase: LifecyclePhase
    reason: str = ""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        return self.phase in {LifecyclePhase.COMPLETE, LifecyclePhase.FAILED}


def judge(
    spec: VCPORunSpec,
    status: RunStatus,
    signals: RunSignals | None,
    now_s: float,
    *,
    has_more_steps: bool = False,
) -> RunVerdict:
    """Return the lifecycle phase of a run.

    status: Counts the learner's restarts up to now; its clocks run if the run has started.
    has_more_steps: Whether the learner that sent them was started for fewer steps.
    """
    recorded = _recorded_end(status)
    if recorded is not None:
        return recorded
    if signals is not None and signals.phase is RunPhase.COMPLETE and not has_more_steps:
        return _complete_verdict(spec, signals)
    if signals is not None and signals.phase is RunPhase.FAILED:
        message = signals.failure or "The learner gave up; its journal on the volume says why."
        return RunVerdict(phase=LifecyclePhase.FAILED, reason="LearnerFailed", message=message)
    if spec.suspend:
        return RunVerdict(phase=LifecyclePhase.SUSPEND)
    exceeded = _exceeded_limit(spec, status, now_s)
    return exceeded or RunVerdict(phase=LifecyclePhase.RUN)


def starts_new_attempt(spec: VCPORunSpec, status: RunStatus, generation: int) -> bool:
    """Whether a failed run starts again: the user edited its spec and did not suspend it."""
    edited = generation > status.observed_generation
    return status.holds("Failed") and edited and not spec.suspend


def next_phase_change_s(spec: VCPORunSpec, status: RunStatus, verdict: RunVerdict) -> float | None:
    """Return the Unix time at which the phase changes if nothing else happens; None: never."""
    if verdict.has_ended:
        ttl_s = spec.ttl_seconds_after_finished
        if ttl_s is None or status.completion_s is None:
            return None
        return status.completion_s + ttl_s
    times = _run_times(status)
    if verdict.phase is LifecyclePhase.SUSPEND or times is None:
        return None
    return run_limits.next_deadline_s(spec, times)


def startup_deadline_s(spec: VCPORunSpec, status: RunStatus) -> float | None:
    """Return the time at which a run without a step fails; None if that deadline does not act."""
    times = _run_times(status)
    if times is None or status.completion_s is not None:
        return None
    return run_limits.startup_deadline_s(spec, times)


def is_past_time_to_live(spec: VCPORunSpec, status: RunStatus, now_s: float) -> bool:
    """Whether the run ended `ttlSecondsAfterFinished` ago or earlier."""
    ttl_s = spec.ttl_seconds_after_finished
    if ttl_s is None or status.completion_s is None or _recorded_end(status) is None:
        return False
    return now_s >= status.completion_s + ttl_s


def _complete_verdict(spec: VCPORunSpec, signals: RunSignals) -> RunVerdict:
    """Return the verdict on a run that took all its steps: also whether it learned."""
    if signals.has_never_updated(spec.steps):
        reason = "WithoutUpdate"
    else:
        reason = COLLAPSED if signals.collapse else "Succeeded"
    unmoved = judgement.unmoved(signals, spec.steps)
    sentences = (f"All {spec.steps} steps are taken.", signals.collapse, unmoved)
    message = " ".join(filter(None, sentences))
    return RunVerdict(phase=LifecyclePhase.COMPLETE, reason=reason, message=message)


def _recorded_end(status: RunStatus) -> RunVerdict | None:
    for kind, phase in (("Complete", LifecyclePhase.COMPLETE), ("Failed", LifecyclePhase.FAILED)):
        condition = status.condition(kind)
        if condition is not None and condition.status == "True":
            return RunVerdict(phase=phase, reason=condition.reason, message=condition.message)
    return None


def _exceeded_limit(spec: VCPORunSpec, status: RunStatus, now_s: float) -> RunVerdict | None:
    """Return the verdict on a run that exceeded a limit, with what was in its way."""
    times = _run_times(status)
    exceeded = exceeded_restarts(spec, status.learner.failures)
    context = _last_end(status)
    if exceeded is None and times is not None:
        exceeded = exceeded_deadline(spec, times, now_s)
        context = _hindrance(status)
    if exceeded is None:
        return None
    return RunVerdict(
        phase=LifecyclePhase.FAILED,
        reason=exceeded.reason.value,
        message=f"{exceeded.message}{context}",
    )


def _run_times(status: RunStatus) -> RunTimes | None:
    if status.start_s is None:
        return None
    return RunTimes(
        start_s=status.start_s,
        admission_s=status.admission_s,
        has_stepped=status.first_step_s is not None,
    )


def _last_end(status: RunStatus) -> str:
    """Return how the learner ended last, as the end of a message; empty when it is unknown."""
    end = status.learner.last_end
    if end is None:
        return ""
    cause = redact_and_shorten(" ".join(end.message.split()), _MAX_CAUSE_CHARACTERS)
    details = f": {cause}" if cause else "."
    return f" The last time it ended with exit code {end.exit_code} ({end.reason}){details}"


def _hindrance(status: RunStatus) -> str:
    """Return what the last reconcile found in the way, as the end of a message.

    The clean-up then removes the pods, and with them the cause.
    """
    for kind in ("LearnerReady", "RolloutsReady"):
        condition = status.condition(kind)
        if condition is not None and condition.status == "False":
            return f" {kind} ({condition.reason}): {condition.message}"
    return _last_end(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerDrain:
    """A learner that ends before its workers are removed."""

    reason: str
    since_s: float | None
    """Unix time at which the wait began; None when there was nothing to wait for."""
    until_s: float | None
    """Unix time until which the workloads stay at most; None: they are removed now."""


def decide_drain(
    spec: VCPORunSpec,
    verdict: RunVerdict,
    observed: ObservedState,
    signals: RunSignals | None,
    *,
    since_s: float | None,
    now_s: float,
) -> LearnerDrain | None:
    """Decide whether the learner drains, and how long its workloads stay.

    Returns None when the run continues, or when no workload is left to remove.
    """
    reason = _drain_reason(verdict)
    if not reason or not has_workers(observed):
        return None
    start_s = float(int(now_s)) if since_s is None else since_s
    until_s = start_s + spec.learner.drain_seconds
    is_known = signals is not None and signals.has_contact(SIGNALS_MAX_AGE_S)
    has_work = signals is not None and is_known and signals.has_work
    if now_s >= until_s or not has_work:
        return LearnerDrain(reason=reason, since_s=since_s, until_s=None)
    return LearnerDrain(reason=reason, since_s=start_s, until_s=until_s)


def has_workers(observed: ObservedState) -> bool:
    """Whether the learner and at least one worker are scaled above zero."""
    learner = observed.learner
    has_rollouts = any(group.replicas > 0 for group in observed.groups.values())
    return learner is not None and learner.replicas > 0 and has_rollouts


def accepts_commands(signals: RunSignals | None) -> bool:
    """Whether the learner has just reported that it trains."""
    return signals is not None and signals.is_fresh and signals.phase is RunPhase.RUNNING


def _drain_reason(verdict: RunVerdict) -> str:
    """Return why a learner that trains must end; empty when it need not.

    The learner of a complete run ends by itself.
    """
    if verdict.phase is LifecyclePhase.SUSPEND:
        return "the run is suspended"
    if verdict.phase is LifecyclePhase.FAILED:
        return f"the run has failed: {verdict.message}"
    return ""
