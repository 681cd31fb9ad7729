"""One reconcile of a run as a value: what was observed, how it is judged, when to reconcile again.

Pure.
"""

from dataclasses import dataclass
from typing import Final

from vcpo.api import VCPORun
from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.control.signals import RunSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions import status
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.lifecycle import (
    LearnerDrain,
    LifecyclePhase,
    RunVerdict,
    decide_drain,
    judge,
    next_phase_change_s,
    starts_new_attempt,
)
from vcpo_operator.decisions.status import with_restarts
from vcpo_operator.names import Role, learner_name
from vcpo_operator.observed.records import Cause, ObservedState, RunRecord
from vcpo_operator.observed.status import RunStatus

RESYNC_PERIOD_S: Final = 60.0
"""Longest time between two reconciles of a run."""
PENDING_POLL_S: Final = 15.0
"""Least time between two polls of a learner that has no node."""
DRAIN_POLL_S: Final = 1.0
"""Longest time between two reconciles while the operator waits for a learner to end. A learner that
has saved exits, and its pod would start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one reconcile of a run observed, and how it judges it."""

    record: RunRecord
    run: VCPORun
    before: RunStatus
    """The status as the last reconcile left it."""
    current: RunStatus
    """The status with what this reconcile observed; without conditions and groups."""
    observed: ObservedState
    signals: RunSignals | None
    """The learner's last known signals of this attempt; None when there are none."""
    silence: Cause | None = None
    """Why the newest request for signals brought none; None if it did, or nobody knows."""
    verdict: RunVerdict
    draining: LearnerDrain | None
    is_new_attempt: bool
    """Whether the run had failed and starts again with this reconcile."""
    now_s: float
    ends_now: bool = False

    @property
    def is_learner_down(self) -> bool:
        """Whether the learner's pods end anyway or are not there, so that others lose nothing.

        A learner that took all the steps that it was started for has more to take: it starts again.
        """
        if self.verdict.has_ended:
            return False
        is_done = self.signals is not None and self.signals.phase is RunPhase.COMPLETE
        is_ending = is_done or self.is_new_attempt or bool(self.current.learner.replaced)
        is_suspended = self.verdict.phase is LifecyclePhase.SUSPEND
        return is_ending or is_suspended or not self.observed.pods_of(Role.LEARNER)

    def requeue_after_s(self, now_s: float) -> float:
        """Return the seconds from `now_s` to the next reconcile if nothing happens before."""
        waits_s = [RESYNC_PERIOD_S]
        if self.verdict.phase is LifecyclePhase.RUN:
            poll_s = self.run.spec.control.poll_seconds
            is_placed = any(pod.node for pod in self.observed.pods_of(Role.LEARNER))
            waits_s.append(poll_s if is_placed else max(poll_s, PENDING_POLL_S))
        if self.draining is not None and self.draining.until_s is not None:
            waits_s += [DRAIN_POLL_S, max(0.0, self.draining.until_s - now_s)]
        deadline_s = next_phase_change_s(self.run.spec, self.current, self.verdict)
        if deadline_s is not None:
            waits_s.append(max(0.0, deadline_s - now_s))
        return min(waits_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What happened when a plan was executed."""

    refusal: str = ""
    """Why the API server or a builder refused the spec; empty when nothing was refused."""
    error: str = ""
    retry_after_s: float | None = None
    """How long the API server asked to be left alone; None when it did not."""
    conflict: Conflict | None = None
    note: str = ""
    """How the operator departs from the spec, in sentences; empty when it does not."""
    needs_replan: bool = False
    """Whether keys were created, on which the rest of the plan depends."""
    pending: str | None = ""
    """Why the pods are not of the newest revision, in a sentence; empty when they are; None if it
    was not decided."""

    @property
    def blocker(self) -> Conflict | None:
        """Why the plan was not executed to its end; None when it was."""
        if self.error:
            return Conflict(reason="ApplyFailed", message=self.error)
        return self.conflict


def judge_run(
    record: RunRecord,
    run: VCPORun,
    *,
    before: RunStatus,
    observed: ObservedState,
    signals: RunSignals | None,
    now_s: float,
    kept: Revision | None = None,
    silence: Cause | None = None,
) -> Snapshot:
    """Judge what was observed of a run.

    kept: What the pods that the run has are made of; None when it has none.
    silence: Why the newest request for them brought none; None if it did.
    """
    signals = signals_of_this_run(signals, before, observed, now_s)
    # A learner that ends because the run is suspended has not failed.
    num_pods = run.spec.learner.replicas
    current = before if run.spec.suspend else with_restarts(before, observed, num_pods=num_pods)
    is_new_attempt = starts_new_attempt(run.spec, before, record.generation)
    if is_new_attempt:
        current, signals = status.as_new_attempt(current), None
    current = status.with_clocks(current, run.spec, observed, signals, now_s)
    current = status.with_signals(current, run.spec, signals)
    has_more_steps = _has_more_steps(run, kept, observed, signals)
    if has_more_steps:
        # Another start: what this learner said last must not count as the next one's end.
        current = current.but(start_s=float(int(now_s)) + 1.0)
    verdict = judge(run.spec, current, signals, now_s, has_more_steps=has_more_steps)
    drain = decide_drain(run.spec, verdict, observed, signals, since_s=before.drain_s, now_s=now_s)
    return Snapshot(
        record=record,
        run=run,
        before=before,
        current=status.with_end(current, verdict, now_s).but(
            drain_s=None if drain is None else drain.since_s
        ),
        observed=observed,
        signals=signals,
        silence=silence,
        verdict=verdict,
        draining=drain,
        is_new_attempt=is_new_attempt,
        now_s=now_s,
        ends_now=verdict.has_ended and current.completion_s is None,
    )


def _has_more_steps(
    run: VCPORun, kept: Revision | None, observed: ObservedState, signals: RunSignals | None
) -> bool:
    """Whether the learner that is complete was started for fewer steps than the run has now.

    It has taken as many as it was started for. Its pod may be of an older template for another
    reason.
    """
    if kept is None or signals is None or signals.phase is not RunPhase.COMPLETE:
        return False
    known = (None, kept.template_digest(learner_name(run.metadata.name)))
    pods = (pod for pod in observed.pods if pod.role is Role.LEARNER and pod.index == 0)
    is_older = any(pod.template_digest not in known for pod in pods)
    return (is_older or kept.steps < run.spec.steps) and signals.step < run.spec.steps


def signals_period_s(run: VCPORun, before: RunStatus) -> float:
    """Return the time between two calls of the learner; 0 calls it at every reconcile.

    A learner that drains is called every time: older signals do not say whether its workers may go
    now.
    """
    is_draining = run.spec.suspend or before.completion_s is not None
    return 0.0 if is_draining else run.spec.control.poll_seconds


def keeps_last_known_signals(snapshot: Snapshot, first_seen_s: float) -> bool:
    """Whether the conditions keep the signals that the operator before this one received.

    A restarted operator may need a moment to reach the learners. It has as long as signals count as
    fresh.

    first_seen_s: Unix time at which this operator first reconciled the run.
    """
    fresh_until_s = first_seen_s + SIGNALS_MAX_AGE_S
    was_fresh = snapshot.signals is None and snapshot.before.holds("SignalsFresh")
    is_running = snapshot.verdict.phase is LifecyclePhase.RUN
    return is_running and was_fresh and snapshot.now_s <= fresh_until_s


def signals_of_this_run(
    signals: RunSignals | None, before: RunStatus, observed: ObservedState, now_s: float
) -> RunSignals | None:
    """Return the signals unless they may describe an earlier run or attempt; then None.

    A Prometheus still holds the samples of an earlier run of the same name, and of the time before
    a suspension. With them a new run could complete in the phase of the old one. While the learner
    drains, reports only get newer. A learner that has failed keeps reporting it. So a failure
    counts only in fresh signals, and only while the learner's pod is not terminating.
    """
    if signals is None or before.drain_s is not None:
        return signals
    may_be_old = not signals.is_fresh or not observed.pods_of(Role.LEARNER)
    if signals.phase is RunPhase.FAILED and may_be_old:
        return None
    start_s = now_s if before.start_s is None else before.start_s
    return signals if signals.is_from_after(start_s, now_s=now_s) else None
