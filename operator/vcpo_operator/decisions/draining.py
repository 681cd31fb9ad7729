"""Draining: a learner that trains ends in good order before its workers are taken away. Pure.

```
trains --Drain--> hands out nothing more, takes what is under way --> nothing in flight --> all goes
   `------------- does not answer, or `learner.drainSeconds` are over ----------------------^
```
The workloads stay as long as there is something to wait for. A learner that saves meanwhile may be
stopped: its pod then gets the same order by SIGTERM, and time to finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Cleanup
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict, cleanup
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.report import LearnerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerDrain:
    """A learner that is to end before its workers go."""

    reason: str
    since_s: float | None
    """Unix time at which the wait began; None when there was nothing to wait for."""
    until_s: float | None
    """Unix time until which the workloads stay at most; None: they go now."""


def draining(
    spec: VCPORunSpec,
    verdict: RunVerdict,
    observed: ObservedState,
    report: LearnerReport | None,
    *,
    since_s: float | None,
    now_s: float,
) -> LearnerDrain | None:
    """Judge whether the learner is to end, and whether that is worth waiting for.

    since_s: When the wait began, as the run's status holds it.
    now_s: Unix time.
    Returns None when the run goes on, or when there is nothing left to take away.
    """
    reason = _reason(spec, verdict)
    if not reason or not has_workers(observed):
        return None
    begun_s = float(int(now_s)) if since_s is None else since_s
    until_s = begun_s + spec.learner.drain_seconds
    if now_s >= until_s or not _has_work(spec, report):
        return LearnerDrain(reason=reason, since_s=since_s, until_s=None)
    return LearnerDrain(reason=reason, since_s=begun_s, until_s=until_s)


def has_workers(observed: ObservedState) -> bool:
    """Whether there are a learner and workers that could be taken away."""
    learner = observed.learner
    working = any(group.replicas > 0 for group in observed.groups.values())
    return learner is not None and learner.replicas > 0 and working


def accepts_commands(report: LearnerReport | None) -> bool:
    """Whether a learner that trains has just said so."""
    return report is not None and report.is_fresh and report.phase is RunPhase.RUNNING


def _reason(spec: VCPORunSpec, verdict: RunVerdict) -> str:
    """Why a learner that still trains is to end; a complete one has ended by itself."""
    if verdict.phase is LifecyclePhase.SUSPEND:
        return "the run is suspended"
    goes = spec.suspend or cleanup(spec, verdict) is not Cleanup.RETAIN_WORKLOADS
    if verdict.phase is LifecyclePhase.FAILED and goes:
        return f"the run has failed: {verdict.message}"
    return ""


def _has_work(spec: VCPORunSpec, report: LearnerReport | None) -> bool:
    """Whether a learner that answers still has something to finish."""
    if report is None or report.is_silent:
        return False
    if report.signals.age_s > spec.control.signals_max_age_seconds:
        return False
    unfinished = report.phase is RunPhase.DRAINING and report.signals.in_flight > 0
    return report.phase is RunPhase.RUNNING or unfinished
