"""One look at a run: what was seen and judged, and when to look again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vcpo.spec import VCPORun
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.draining import LearnerDrain
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict, next_deadline_s
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.observed.report import LearnerReport

RESYNC_PERIOD_S: Final = 60.0
"""Longest time between two looks at a run."""
DRAIN_POLL_S: Final = 1.0
"""Longest time between two looks at a run whose learner is waited for: one that has saved exits,
and its pod would start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at a run: everything that later stages need of the earlier ones."""

    record: RunRecord
    run: VCPORun
    before: RunStatus
    current: RunStatus
    observed: ObservedState
    report: LearnerReport | None
    verdict: RunVerdict
    draining: LearnerDrain | None
    is_new_attempt: bool
    """Whether the run had failed and is tried again with this look."""
    now_s: float

    def requeue_after_s(self, now_s: float) -> float:
        """When to look again if nothing happens, in seconds from `now_s`."""
        wakes_s = [RESYNC_PERIOD_S]
        if self.verdict.phase is LifecyclePhase.RUN:
            wakes_s.append(self.run.spec.control.poll_seconds)
        if self.draining is not None and self.draining.until_s is not None:
            wakes_s += [DRAIN_POLL_S, max(0.0, self.draining.until_s - now_s)]
        deadline_s = next_deadline_s(self.run.spec, self.current, self.verdict)
        if deadline_s is not None:
            wakes_s.append(max(0.0, deadline_s - now_s))
        return min(wakes_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What carrying out a plan came to."""

    refusal: str = ""
    """Why the spec cannot be carried out as it is; empty when it can."""
    error: str = ""
    """What went wrong; empty when nothing did."""
    retry_after_s: float | None = None
    conflict: Conflict | None = None
    """What stands in the way; None when nothing does."""
    needs_replan: bool = False
    """Whether there is a token now, and the rest can be planned."""

    def stopped_by(self) -> Conflict | None:
        """What kept the plan from being carried out; None when nothing did."""
        if self.error:
            return Conflict(reason="ApplyFailed", message=self.error)
        return self.conflict


def signals_period_s(run: VCPORun, before: RunStatus) -> float:
    """Time between two questions to the learner; 0: it is asked at every look.

    What it said earlier is no answer to whether its workers may go now.
    """
    resting = run.spec.suspend or before.completion_s is not None
    return 0.0 if resting else run.spec.control.poll_seconds


def keeps_last_known_signals(look: Snapshot, first_seen_s: float) -> bool:
    """Whether what an earlier operator heard of the learner still stands.

    A fresh operator may need a moment to reach learners it was in touch with before it was
    restarted; the time for which signals are good is that moment.
    first_seen_s: Unix time of this operator's first look at the run.
    """
    good_until_s = first_seen_s + look.run.spec.control.signals_max_age_seconds
    heard_before = look.report is None and look.before.holds("SignalsFresh")
    return look.verdict.phase is LifecyclePhase.RUN and heard_before and look.now_s <= good_until_s


def report_of_this_run(
    report: LearnerReport | None, before: RunStatus, observed: ObservedState, now_s: float
) -> LearnerReport | None:
    """The report, unless an earlier run of the same name or the time before a rest is its origin.

    A Prometheus remembers both; without this a new run could complete with the old one's phase.
    While the learner is waited for its reports only get newer. The failure of a learner whose pod
    is leaving is that of an attempt which is over; so may be one that is only remembered, and a
    learner that failed lingers to say so again.
    """
    if report is None or before.drain_s is not None:
        return report
    may_be_past = not report.is_fresh or not observed.pods_of(Role.LEARNER)
    if report.phase is RunPhase.FAILED and may_be_past:
        return None
    start_s = now_s if before.start_s is None else before.start_s
    return report if report.is_from_after(start_s, now_s=now_s) else None
