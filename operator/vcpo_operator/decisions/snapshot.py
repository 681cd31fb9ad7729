"""One reconcile of a run as a value: what was observed, how it is judged, when to reconcile again.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from vcpo.api import VCPORun, VCPORunSpec
from vcpo.control.signals import RunSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions import status
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.draining import LearnerDrain, decide_drain
from vcpo_operator.decisions.lifecycle import (
    LifecyclePhase,
    RunVerdict,
    judge,
    next_phase_change_s,
    starts_new_attempt,
)
from vcpo_operator.decisions.model_download import awaits_model, is_of_earlier_attempt
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.decisions.upgrade import RevisionDecision
from vcpo_operator.names import Role, learner_name
from vcpo_operator.observed.records import Cause, ObservedPod, ObservedState, RunRecord

RESYNC_PERIOD_S: Final = 60.0
"""Longest time between two reconciles of a run."""
LEARNER_PATIENCE_S: Final = 120.0
"""Time that a learner may be without a node, or unable to start, before its workers go."""
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
    """Unix time."""
    ends_now: bool = False
    """Whether the run ended since the last reconcile."""
    kept: Revision | None = None
    """What the pods that the run has are made of; None when it has none."""

    @property
    def is_learner_down(self) -> bool:
        """Whether the learner's pods end anyway or are not there, so that others lose nothing.

        A learner that took all the steps that it was started for has more to take: it starts again.
        """
        if self.verdict.has_ended:
            return False
        is_done = self.signals is not None and self.signals.phase is RunPhase.COMPLETE
        is_ending = is_done or self.is_new_attempt or bool(self.current.restarts.replaced)
        is_suspended = self.verdict.phase is LifecyclePhase.SUSPEND
        return is_ending or is_suspended or not self.observed.pods_of(Role.LEARNER)

    @property
    def awaits_model(self) -> bool:
        """Whether the pods start only when the model is downloaded."""
        return not self.verdict.has_ended and awaits_model(self.run.spec, self.observed)

    @property
    def repeats_download(self) -> bool:
        """Whether the Job that downloads the model failed in an attempt that is over."""
        return is_of_earlier_attempt(self.observed, self.current.start_s)

    @property
    def lends_workers_back(self) -> bool:
        """Whether workers would only hold their machines, because the learner cannot start.

        It has no node, or its containers cannot be made, for longer than an ordinary start takes.
        Workers without a node hold nothing: a queue may admit them together with the learner. A
        scheduler of the user's own may place all pods together, so it has them all.
        """
        if self.verdict.phase is not LifecyclePhase.RUN or _has_own_scheduler(self.run.spec):
            return False
        known = self.before.condition("LearnerReady")
        since_s = known.transition_s if known is not None else self.now_s
        if known is None or known.status == "True" or self.now_s < since_s + LEARNER_PATIENCE_S:
            return False
        pods = self.observed.pods_of(Role.LEARNER)
        able = [pod for pod in pods if pod.ready or (pod.node is not None and not _is_stuck(pod))]
        rollouts = self.before.condition("RolloutsReady")
        is_lent = rollouts is not None and rollouts.reason == "LearnerCannotStart"
        holds = is_lent or any(pod.node for pod in self.observed.pods_of(Role.ROLLOUT))
        return holds and len(able) < self.run.spec.learner.replicas

    def has_started(self, revision: Revision) -> bool:
        """Whether all of the learner's pods are of a revision, and answer."""
        digest = revision.template_digest(learner_name(self.run.metadata.name))
        pods = [pod for pod in self.observed.pods if pod.role is Role.LEARNER]
        num_current = sum(pod.ready and pod.template_digest == digest for pod in pods)
        return num_current == len(pods) == self.run.spec.learner.replicas

    def requeue_after_s(self, now_s: float) -> float:
        """Return the seconds from `now_s` to the next reconcile if nothing happens before."""
        waits_s = [RESYNC_PERIOD_S]
        if self.verdict.phase is LifecyclePhase.RUN:
            waits_s.append(self.run.spec.control.poll_seconds)
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
    """The error that stopped the plan; empty when none did."""
    retry_after_s: float | None = None
    """How long the API server asked to be left alone; None when it did not."""
    conflict: Conflict | None = None
    """The object that is in the way; None when none is."""
    note: str = ""
    """How the operator departs from the spec, in sentences; empty when it does not."""
    needs_replan: bool = False
    """Whether keys were created, on which the rest of the plan depends."""
    revision: RevisionDecision | None = None
    """What the pods are made of; None if the run has no learner now, or it was not decided."""

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

    before: The status as the last reconcile left it.
    kept: What the pods that the run has are made of; None when it has none.
    signals: The learner's newest signals, of whichever attempt.
    silence: Why the newest request for them brought none; None if it did.
    now_s: Unix time.
    """
    signals = signals_of_this_run(signals, before, observed, now_s)
    # A learner that ends because the run is suspended has not failed.
    num_pods = run.spec.learner.replicas
    current = before if run.spec.suspend else before.with_restarts(observed, num_pods=num_pods)
    is_new_attempt = starts_new_attempt(run.spec, before, record.generation)
    if is_new_attempt:
        current, signals = status.as_new_attempt(current), None
    current = status.with_clocks(current, run.spec, observed, signals, now_s)
    current = status.with_signals(current, run.spec, signals)
    has_more_steps = _has_more_steps(run, kept, observed, signals)
    if has_more_steps:
        # Another start: what this learner said last must not count as the next one's end.
        current = replace(current, start_s=float(int(now_s)) + 1.0)
    verdict = judge(
        run.spec, current, signals, now_s, observed=observed, has_more_steps=has_more_steps
    )
    drain = decide_drain(run.spec, verdict, observed, signals, since_s=before.drain_s, now_s=now_s)
    return Snapshot(
        record=record,
        run=run,
        before=before,
        current=replace(
            status.with_end(current, verdict, now_s),
            drain_s=None if drain is None else drain.since_s,
        ),
        observed=observed,
        signals=signals,
        silence=silence,
        verdict=verdict,
        draining=drain,
        is_new_attempt=is_new_attempt,
        now_s=now_s,
        ends_now=verdict.has_ended and current.completion_s is None,
        kept=kept,
    )


def _has_own_scheduler(spec: VCPORunSpec) -> bool:
    """Whether a template names a scheduler."""
    groups = (group.template for group in spec.rollouts)
    parts = (each.get("spec") for each in (spec.pods.template, spec.learner.template, *groups))
    return any(isinstance(part, Mapping) and part.get("schedulerName") for part in parts)


def _is_stuck(pod: ObservedPod) -> bool:
    """Whether a pod has a node, and its containers cannot start for a known cause."""
    return pod.is_starting and pod.cause is not None


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
    fresh (`control.signalsMaxAgeSeconds`).

    first_seen_s: Unix time at which this operator first reconciled the run.
    """
    fresh_until_s = first_seen_s + snapshot.run.spec.control.signals_max_age_seconds
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
