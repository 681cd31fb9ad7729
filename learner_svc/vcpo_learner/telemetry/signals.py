"""The signals that a learner sends to the host or the operator, which scale and throttle its run.

Ratios and rates are taken over the last `WINDOW_STEPS` steps and the current wait, so that a
learner without data shows it before its next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.control.signals import WINDOW_STEPS
from vcpo.judgement import num_skipped_at_end
from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import StepRecord, rate_fields
from vcpo.wire.failures import FailureCount
from vcpo.wire.phase import phase_to_message
from vcpo.wire.v1 import control_pb2
from vcpo.wire.versions import step_of
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.ledger import TrajectoryCounts
from vcpo_learner.ledger.worker_registry import SetAsideWorker

_LOW_QUANTILE = 0.1
_OF_LAST_STEP = (
    "calibration_age_steps",
    "warning_level",
    "warning_score",
    "lag_mean",
    "lag_p50",
    "lag_max",
    "cut_responses_ratio",
    "equal_groups_ratio",
    "prompt_tokens_mean",
    "rollbacks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Totals at one time; two of them give rates."""

    time_s: float
    consumed: int
    tokens: int


class SignalWindow:
    """The steps of the window, and totals for rates. Owner: the learner's event loop."""

    def __init__(
        self,
        *,
        run_name: str,
        total_steps: int,
        batch_trajectories: int,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self._run_name = run_name
        self._total_steps = total_steps
        self._batch_trajectories = batch_trajectories
        self._dispatcher = dispatcher
        self._clock = clock
        self._resumed_step = 0
        self.steps: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        """The newest steps of this learner, oldest first."""
        self._last_taken: StepRecord | None = None
        """The newest step that made an update."""
        self._evaluations: list[EvaluationRecord] = []
        self._marks: deque[_Mark] = deque([self._mark()], maxlen=WINDOW_STEPS + 1)
        self._last_step_s = clock()
        self._waited_s = 0.0
        """Up to the last step."""
        self._waiting_since_s: float | None = None
        self._working_since_s: float | None = None
        self._on_policy_ess_ratio = 1.0
        self._failure = ""
        self._collapse = ""
        self._skipped_in_a_row = 0
        self._skip_reason = ""
        self._rollback = ""
        self._rolled_back_step = 0
        self._lost_changes = 0
        self._mismatch = ""

    def resume(self, steps: Sequence[StepRecord]) -> None:
        """Start rates from the totals of a restored checkpoint, and steps from its step.

        steps: records up to the checkpoint, by step; the dispatcher is already at its version.
        """
        self._resumed_step = self._dispatcher.step
        self._skipped_in_a_row = num_skipped_at_end(steps)
        self._skip_reason = steps[-1].skipped or "" if steps else ""
        self._marks.clear()
        self._marks.append(self._mark())

    @property
    def last_step(self) -> StepRecord | None:
        """The newest step of this learner; None before it has taken one."""
        return self.steps[-1] if self.steps else None

    def start_waiting(self) -> None:
        """Note that the learner starts to wait for a batch."""
        # A batch that broke the update was waited for too, and no step ended it.
        self._waited_s = self.waited_s()
        self._waiting_since_s = self._clock()
        self._working_since_s = None

    def start_working(self) -> None:
        """Note that the batch has arrived and the step starts."""
        self._working_since_s = self._clock()

    def record_failure(self, why: str) -> None:
        """Note why the run failed, in a sentence."""
        self._failure = why

    def record_collapse(self, notice: str) -> None:
        """Note how the finished run collapsed, in sentences; empty if it did not."""
        self._collapse = notice

    def record_lost_changes(self, number: int) -> None:
        """Note how many committed changes this start did not find in the redo log."""
        self._lost_changes = number

    def record_mismatch(self, what: str) -> None:
        """Note how far workers and learner are from one policy, in sentences; empty: they agree."""
        self._mismatch = what

    def record_step(self, record: StepRecord) -> None:
        """Note a finished step."""
        self.steps.append(record)
        if record.skipped is None:
            self._last_taken = record
        self._marks.append(self._mark())
        self._last_step_s = self._clock()
        self._waited_s = self.waited_s()
        self._waiting_since_s = self._working_since_s = None
        self._on_policy_ess_ratio = record.on_policy_ess_ratio
        self._skipped_in_a_row = 0 if record.skipped is None else self._skipped_in_a_row + 1
        self._skip_reason = record.skipped or ""

    def record_rollback(self, what: str) -> None:
        """Note a rollback at the current step, and why, as a clause."""
        self._rollback, self._rolled_back_step = what, self._dispatcher.step

    def record_evaluation(self, record: EvaluationRecord) -> None:
        """Note a finished evaluation."""
        self._evaluations.append(record)

    def tokens_per_s(self) -> float:
        """Return the response tokens accepted per second over the window."""
        first, now = self._marks[0], self._mark()
        return (now.tokens - first.tokens) / max(now.time_s - first.time_s, 1e-9)

    def message(self) -> control_pb2.Signals:
        """Return the current signals."""
        dispatcher = self._dispatcher
        counts = dispatcher.ledger.counts()
        first, now = self._marks[0], self._mark()
        span_s = max(now.time_s - first.time_s, 1e-9)
        last = self.last_step
        signals = control_pb2.Signals(
            run_name=self._run_name,
            phase=phase_to_message(dispatcher.phase),
            # The version is already raised while it is published. The numbers are then still those
            # of the step before, and the control loop would judge the new step by them.
            step=self._resumed_step if last is None else last.step,
            total_steps=self._total_steps,
            policy_version=dispatcher.step,
            on_policy_ess_ratio=self._on_policy_ess_ratio,
            trajectories=_counts_message(counts),
            batch_trajectories=self._batch_trajectories,
            lag_limit_steps=dispatcher.lag_limit_steps,
            learner_idle_ratio=self.idle_ratio(),
            consumed_trajectories_per_second=(now.consumed - first.consumed) / span_s,
            generated_tokens_per_second=(now.tokens - first.tokens) / span_s,
            evaluations=[_evaluation_message(record) for record in self._evaluations],
            workers=self._worker_messages(),
            seconds_since_step=now.time_s - self._last_step_s,
            failures=[_failure_message(one, now.time_s) for one in dispatcher.failures.counts],
            failures_in_a_row=dispatcher.failures.in_a_row,
            set_aside=[_set_aside_message(one, now.time_s) for one in dispatcher.latest_set_aside],
            failure=self._failure,
            skipped_steps_in_a_row=self._skipped_in_a_row,
            skip_reason=self._skip_reason,
            collapse=self._collapse or None,
            lost_changes=self._lost_changes,
            mismatch=self._mismatch,
        )
        if dispatcher.step < self._rolled_back_step + WINDOW_STEPS:
            signals.rollback = self._rollback
        if last is not None:
            self._describe_steps(signals, last)
        return signals

    def _describe_steps(self, signals: control_pb2.Signals, last: StepRecord) -> None:
        # A step whose weights have no value reports 0, which no batch has.
        ratios = [record.ess_ratio for record in self.steps if record.ess_ratio > 0]
        if ratios:
            signals.ess_ratio = ratios[-1]
            signals.ess_ratio_mean = sum(ratios) / len(ratios)
            signals.ess_ratio_low = _quantile(ratios, _LOW_QUANTILE)
        for name in _OF_LAST_STEP:
            setattr(signals, name, getattr(last, name))
        if self._last_taken is not None and (rate := self._last_taken.effective_rate) is not None:
            for name, value in rate_fields(rate).items():
                setattr(signals, name, value)
        signals.reward_mean = sum(record.reward_mean for record in self.steps) / len(self.steps)

    def waited_s(self) -> float:
        """Return the seconds that the learner has waited for batches so far."""
        return self._waited_s + self._waiting_s()

    def _waiting_s(self) -> float:
        """Return how long the current step has waited for its batch; 0 between steps."""
        if self._waiting_since_s is None:
            return 0.0
        until_s = self._clock() if self._working_since_s is None else self._working_since_s
        return until_s - self._waiting_since_s

    def idle_ratio(self) -> float:
        """Return the share of the window in which the learner waited for data, in [0, 1].

        The current step counts with the time that it has waited and worked so far.
        """
        idle_s = sum(record.idle_s for record in self.steps)
        busy_s = sum(record.step_s for record in self.steps)
        if self._waiting_since_s is not None:
            waited_s = self._waiting_s()
            idle_s += waited_s
            busy_s += self._clock() - self._waiting_since_s - waited_s
        return idle_s / (idle_s + busy_s) if idle_s + busy_s > 0 else 0.0

    def _worker_messages(self) -> list[control_pb2.Worker]:
        now_s = self._clock()
        in_flight = self._dispatcher.ledger.leases.in_flight_by_worker()
        return [
            control_pb2.Worker(
                worker_id=worker.worker_id,
                rollout_group=worker.rollout_group,
                policy_version=step_of(worker.policy_version),
                seconds_since_seen=now_s - worker.last_seen_s,
                in_flight_trajectories=in_flight.get(worker.worker_id, 0),
                accepted_trajectories=worker.accepted_trajectories,
            )
            for worker in self._dispatcher.workers()
        ]

    def _mark(self) -> _Mark:
        return _Mark(
            time_s=self._clock(),
            consumed=self._dispatcher.ledger.counts().consumed,
            tokens=self._dispatcher.accepted_tokens,
        )


def _counts_message(counts: TrajectoryCounts) -> control_pb2.TrajectoryCounts:
    return control_pb2.TrajectoryCounts(
        leased=counts.leased,
        in_flight=counts.in_flight,
        buffered=counts.buffered,
        consumed=counts.consumed,
        dropped=dict(counts.dropped),
    )


def _failure_message(failure: FailureCount, now_s: float) -> control_pb2.FailureCount:
    return control_pb2.FailureCount(
        cause=failure.latest.cause,
        message=failure.latest.sentence,
        count=failure.count,
        seconds_since_latest=now_s - failure.latest_s,
    )


def _set_aside_message(worker: SetAsideWorker, now_s: float) -> control_pb2.SetAsideWorker:
    return control_pb2.SetAsideWorker(
        worker_id=worker.worker_id,
        rollout_group=worker.rollout_group,
        cause=worker.cause,
        message=worker.message,
        seconds_since=now_s - worker.time_s,
    )


def _evaluation_message(record: EvaluationRecord) -> control_pb2.Evaluation:
    return control_pb2.Evaluation(
        step=record.step, accuracy=record.accuracy, num_trajectories=record.num_trajectories
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which about `share` of the values lie."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]
