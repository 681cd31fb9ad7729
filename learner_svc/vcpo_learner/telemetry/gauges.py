"""Writes the learner's metrics from its records and its ledger."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client import Counter as CounterMetric
from prometheus_client import Gauge as GaugeMetric

from vcpo.algo.health.collapse import num_low_at_end, share_error
from vcpo.metrics import LearnerMetrics
from vcpo.metrics.label_values import MemoryState, Stage, WeightForm
from vcpo.metrics.step_gauges import gauge_values
from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import StepRecord
from vcpo.wire.phase import RunPhase
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.signals import SignalWindow

_Value = TypeVar("_Value", bound=str)
_MAX_GROUPS = 16
"""Rollout groups that become a label; workers name their group, and labels must stay few."""


class LearnerGauges:
    """Writes the learner's metrics. Owner: the learner's event loop."""

    def __init__(
        self,
        metrics: LearnerMetrics,
        *,
        dispatcher: Dispatcher,
        signals: SignalWindow,
        clock: Clock = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self._clock = clock
        self._dispatcher = dispatcher
        self._signals = signals
        self._groups_seen: set[str] = set()
        self._labels_shown: dict[GaugeMetric, set[str]] = {}
        """Labels that the last step had, of gauges with one."""
        self._stage_s: dict[Stage, float] = {}
        """Time since the last step, by stage."""
        self._waited_s = 0.0
        """Wait for batches up to the last step."""
        self._leased = 0
        self._counted: dict[CounterMetric, Mapping[str, int]] = {}
        """What counters with one label have counted, by label."""

    def skip_counted(self) -> None:
        """Take the counts of a restored ledger as counted: they are no new events."""
        counts = self._dispatcher.ledger.counts()
        self._leased = counts.leased
        self._counted[self.metrics.dropped] = counts.dropped

    def record_step(
        self, record: StepRecord, groups: Sequence[Lease], log_weights: Sequence[float] = ()
    ) -> None:
        """Show a finished step and count the groups that it consumed.

        log_weights: log importance weights of the trajectories, nats; empty if one has no value.
        Consumed trajectories are counted here only: before its step has ended, a batch may be given
        back to the ledger.
        """
        metrics = self.metrics
        metrics.steps.inc()
        if record.skipped is not None:
            metrics.skipped_steps.labels(record.skipped).inc()
        metrics.step_duration_s.observe(record.step_s)
        self._trained_on(record.step - 1, groups)
        for log_weight in log_weights:
            metrics.log_importance_weight.observe(log_weight)
        self._show_stages()
        self.show_step(record)

    def show_step(self, record: StepRecord) -> None:
        self._last_step(record)
        self.metrics.step_timestamp_s.set(record.time_unix_s)
        self.refresh()

    def _trained_on(self, step: int, groups: Sequence[Lease]) -> None:
        """Count what a step consumed; step: number of the steps before it."""
        metrics = self.metrics
        for trajectory in (one for group in groups for one in group.trajectories):
            metrics.reward.observe(trajectory.reward)
            metrics.response_tokens.observe(trajectory.num_sampled_tokens)
            metrics.policy_lag_steps.observe(max(0, step - trajectory.oldest_step))

    def _show_stages(self) -> None:
        waited_s = self._signals.waited_s()
        self.add_stage(Stage.WAIT, waited_s - self._waited_s)
        self._waited_s = waited_s
        for stage in Stage:
            self.metrics.step_stage_s.labels(stage).set(self._stage_s.pop(stage, 0.0))

    def _last_step(self, record: StepRecord) -> None:
        """Show the numbers of a step; those that it lacks are not shown."""
        metrics = self.metrics
        for gauge, value in gauge_values(record):
            metrics.last_step[gauge.name].set(math.nan if value is None else value)
        for gauge_of_label, values in (
            (metrics.lag_ess_ratio, record.ess_by_lag),
            (metrics.reward_part, record.reward_parts),
        ):
            shown = self._labels_shown.get(gauge_of_label, set())
            for label, number in values.items():
                gauge_of_label.labels(label).set(number)
            for label in shown - set(values):
                gauge_of_label.remove(label)
            self._labels_shown[gauge_of_label] = set(values)

    def set_device_memory(self, size_bytes: Mapping[MemoryState, int]) -> None:
        for state, size in size_bytes.items():
            self.metrics.device_memory_bytes.labels(state).set(size)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Count the time until the end of the block as a stage of the learner's work."""
        started_s = self._clock()
        try:
            yield
        finally:
            self.add_stage(stage, self._clock() - started_s)

    def add_stage(self, stage: Stage, duration_s: float) -> None:
        self._stage_s[stage] = self._stage_s.get(stage, 0.0) + duration_s

    def record_resume(self, *, now_unix_s: float, saved_unix_s: float) -> None:
        """Show the last step before the checkpoint from which the learner resumed.

        saved_unix_s: when the checkpoint was written.
        """
        metrics = self.metrics
        if self._signals.last_step is not None:
            self._last_step(self._signals.last_step)
        metrics.checkpoint_timestamp_s.set(saved_unix_s)
        # A learner that resumes is not stalled, however long ago the step was.
        metrics.step_timestamp_s.set(now_unix_s)

    def record_evaluation(self, record: EvaluationRecord, accuracies: Mapping[int, float]) -> None:
        """Show a finished evaluation.

        accuracies: of all evaluations of the run up to this one, by step.
        """
        values = [accuracies[step] for step in sorted(accuracies)]
        errors = [share_error(each, record.num_prompts) for each in values]
        self.metrics.low_evaluations.set(num_low_at_end(values, errors=errors))
        self.metrics.evaluation_accuracy.set(record.accuracy)
        self.metrics.evaluation_timestamp_s.set(record.time_unix_s)

    def record_checkpoint(self, time_unix_s: float, *, size_bytes: int, free_bytes: int) -> None:
        self.metrics.checkpoint_timestamp_s.set(time_unix_s)
        self.metrics.checkpoint_bytes.set(size_bytes)
        self.metrics.disk_free_bytes.set(free_bytes)

    def refresh(self) -> None:
        """Show what changes between steps."""
        metrics, dispatcher = self.metrics, self._dispatcher
        counts = dispatcher.ledger.counts()
        metrics.in_flight.set(counts.in_flight)
        metrics.buffered.set(counts.buffered)
        metrics.leased.inc(counts.leased - self._leased)
        self._leased = counts.leased
        self._raise(metrics.dropped, counts.dropped)
        metrics.policy_version.set(dispatcher.step)
        metrics.lag_limit_steps.set(dispatcher.lag_limit_steps)
        metrics.failures_in_a_row.set(dispatcher.failures.in_a_row)
        self._raise(metrics.workers_set_aside, dispatcher.registry.num_set_aside)
        for phase in RunPhase:
            metrics.phase.labels(phase.value).set(float(phase is dispatcher.phase))
        metrics.batch_trajectories.set(self._signals.batch_trajectories)
        metrics.lost_changes.set(self._signals.lost_changes)
        metrics.idle_ratio.set(self._signals.idle_ratio())
        metrics.step.set(0 if (last := self._signals.last_step) is None else last.step)
        workers = dispatcher.registry.workers()
        by_group = Counter(worker.rollout_group for worker in workers)
        for group in by_group:
            if len(self._groups_seen) < _MAX_GROUPS:
                self._groups_seen.add(group)
        for group in self._groups_seen:
            metrics.workers.labels(group).set(by_group[group])

    def count_served_weights(self, served_bytes: Mapping[WeightForm, int]) -> None:
        """Count the bytes of policy versions sent since this was called last.

        served_bytes: sent since the server's start, by form.
        """
        self._raise(self.metrics.weights_served_bytes, served_bytes)

    def _raise(self, counter: CounterMetric, totals: Mapping[_Value, int]) -> None:
        before = self._counted.get(counter, {})
        self._counted[counter] = {str(label): total for label, total in totals.items()}
        for label, total in self._counted[counter].items():
            counter.labels(label).inc(total - before.get(label, 0))
