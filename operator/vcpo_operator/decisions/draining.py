"""Draining: a learner that trains finishes before the operator removes its workers. Pure.

```
trains --Drain--> hands out no more work, takes what is in flight --> nothing in flight --> removed
   `------------- no answer, or `learner.drainSeconds` have passed ----------------------^
```
The workloads stay while the learner has work to finish. A learner that only saves may be stopped:
its pod receives SIGTERM, which means the same, and time to finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.control.signals import RunSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.observed.records import ObservedState


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerDrain:
    """A learner that ends before its workers are removed."""

    reason: str
    """Why it ends, for the learner's journal."""
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

    since_s: When the wait began, as the run's status holds it.
    now_s: Unix time.
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
