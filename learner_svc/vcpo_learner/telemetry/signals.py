"""The signals that a learner sends to the host or the operator, which scale and throttle its run.

Ratios and rates are taken over the last `WINDOW_STEPS` steps and the current wait, so that a
learner without data shows it before its next step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.control.signals import WINDOW_STEPS
from vcpo.records.step_record import StepRecord, record_to_json
from vcpo.wire.phase import phase_to_message
from vcpo.wire.v1 import control_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.workers import SetAsideWorker

_RECENT_S = 600.0
"""A worker that was set aside is told for so long; its replacement has started by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Totals at one time; two of them give rates."""

    time_s: float
    consumed: int
    tokens: int


class SignalWindow:
    """The steps of the window, and the state of the run. Owner: the learner's event loop."""

    def __init__(self, *, batch_trajectories: int, dispatcher: Dispatcher, clock: Clock) -> None:
        self.batch_trajectories = batch_trajectories
        self._dispatcher = dispatcher
        self._clock = clock
        self.steps: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        """The newest steps of the run, oldest first."""
        self.failure = ""
        self.collapse = ""
        """How the finished run collapsed, in sentences."""
        self.mismatch = ""
        """How far workers and learner are from one policy, in sentences."""
        self.lost_changes = 0
        """Committed changes that this start did not find in the redo log."""
        self.accuracy: float | None = None
        """Of the newest evaluation."""
        self._rollback = ""
        self._rolled_back_step = 0
        self._marks: deque[_Mark] = deque([self._mark()], maxlen=WINDOW_STEPS + 1)
        self._last_step_s = clock()
        self._waited_s = 0.0
        """Up to the last step."""
        self._waiting_since_s: float | None = None
        self._working_since_s: float | None = None

    def resume(self, steps: Sequence[StepRecord]) -> None:
        """Go on from a restored checkpoint: its last steps, and the totals for rates.

        steps: records up to the checkpoint, by step; the dispatcher is already at its version.
        """
        self.steps.clear()
        self.steps.extend(steps)
        self._marks.clear()
        self._marks.append(self._mark())

    @property
    def last_step(self) -> StepRecord | None:
        return self.steps[-1] if self.steps else None

    def start_waiting(self) -> None:
        # A batch that broke the update was waited for too, and no step ended it.
        self._waited_s = self.waited_s()
        self._waiting_since_s = self._clock()
        self._working_since_s = None

    def start_working(self) -> None:
        self._working_since_s = self._clock()

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self._marks.append(self._mark())
        self._last_step_s = self._clock()
        self._waited_s = self.waited_s()
        self._waiting_since_s = self._working_since_s = None

    def record_rollback(self, what: str) -> None:
        self._rollback, self._rolled_back_step = what, self._dispatcher.step

    def tokens_per_s(self) -> float:
        first, now = self._marks[0], self._mark()
        return (now.tokens - first.tokens) / max(now.time_s - first.time_s, 1e-9)

    def message(self) -> control_pb2.Signals:
        """Return the current signals."""
        dispatcher = self._dispatcher
        counts, last = dispatcher.ledger.counts(), self.last_step
        first, now = self._marks[0], self._mark()
        failures = dispatcher.failures
        is_rolled_back = dispatcher.step < self._rolled_back_step + WINDOW_STEPS
        return control_pb2.Signals(
            # The version is already raised while it is published. The numbers are then still those
            # of the step before, and the control loop would judge the new step by them.
            last_step="" if last is None else record_to_json(last),
            phase=phase_to_message(dispatcher.phase),
            policy_version=dispatcher.step,
            lag_limit_steps=dispatcher.lag_limit_steps,
            batch_trajectories=self.batch_trajectories,
            buffered=counts.buffered,
            in_flight=counts.in_flight,
            learner_idle_ratio=self.idle_ratio(),
            consumed_per_s=(now.consumed - first.consumed) / max(now.time_s - first.time_s, 1e-9),
            accuracy=self.accuracy,
            workers=self._worker_messages(now.time_s),
            since_step_s=now.time_s - self._last_step_s,
            failure=self.failure,
            failures_in_a_row=failures.in_a_row,
            generation_failure=failures.counts[0].latest.sentence if failures.counts else "",
            set_aside=_set_aside_notice(dispatcher.registry.latest_set_aside, now.time_s),
            mismatch=self.mismatch,
            rollback=self._rollback if is_rolled_back else "",
            collapse=self.collapse,
            lost_changes=self.lost_changes,
        )

    def waited_s(self) -> float:
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

    def _worker_messages(self, now_s: float) -> list[control_pb2.Worker]:
        in_flight = self._dispatcher.ledger.leases.in_flight_by_worker()
        return [
            control_pb2.Worker(
                worker_id=worker.worker_id,
                rollout_group=worker.rollout_group,
                in_flight=in_flight.get(worker.worker_id, 0),
                silent_s=now_s - worker.last_seen_s,
                accepted=worker.accepted_trajectories,
            )
            for worker in self._dispatcher.registry.workers()
        ]

    def _mark(self) -> _Mark:
        return _Mark(
            time_s=self._clock(),
            consumed=self._dispatcher.ledger.counts().consumed,
            tokens=self._dispatcher.accepted_tokens,
        )


def _set_aside_notice(latest: Sequence[SetAsideWorker], now_s: float) -> str:
    """Return which workers were just set aside, in a sentence; empty if none.

    latest: the latest first.
    """
    recent = [one for one in latest if now_s - one.time_s < _RECENT_S]
    if not recent:
        return ""
    who = f"{recent[0].worker_id} ({recent[0].cause}): {recent[0].message}."
    if len(recent) == 1:
        return f"A worker was set aside, {who}"
    minutes = f"{_RECENT_S / 60:.0f} minutes"
    return f"{len(recent)} workers were set aside in the last {minutes}; the last one is {who}"
