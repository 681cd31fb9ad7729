"""What a learner exports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from vcpo.metrics.label_values import WeightForm
from vcpo.metrics.registry import PartRegistry, measure, start_at_zero
from vcpo.metrics.step_gauges import GAUGES
from vcpo.records.reasons import DropReason, SetAsideCause, SkipReason

_STEP_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0, 1800.0)
_LOG_WEIGHT_BUCKETS = (-8.0, -4.0, -2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_REWARD_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LENGTH_BUCKETS = (16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_MOST_EDGES: Final = 12


def lag_edges(max_policy_lag_steps: int) -> tuple[float, ...]:
    """Return up to 12 whole numbers from 0 to the largest lag, ascending.

    All whole numbers where they are few. Else each limit that the throttle reaches by halving, and
    the middles of the widest gaps between them.
    """
    if max_policy_lag_steps < _MOST_EDGES:
        return tuple(float(lag) for lag in range(max_policy_lag_steps + 1))
    edges = [max_policy_lag_steps]
    while edges[0] > 0:
        edges.insert(0, edges[0] // 2)
    while len(edges) < _MOST_EDGES:
        below, above = max(pairwise(edges), key=lambda gap: (gap[1] - gap[0], -gap[0]))
        edges.insert(edges.index(above), (below + above) // 2)
    return tuple(float(edge) for edge in edges)


class LearnerMetrics:
    """What a learner exports.

    lag_edges: bucket edges of the lag for this run's spec. An edge at the largest possible value
        keeps every quantile at or below it.
    """

    def __init__(self, *, run: str, lag_edges: Sequence[float] = lag_edges(8)) -> None:
        self.registry = registry = PartRegistry("learner", run=run)
        # Exported first and set last: a scrape beside a step then never has the new step with old
        # numbers, by which the operator would judge it.
        self.step = measure(
            "vcpo_learner_step",
            "Optimizer step whose numbers are shown; behind the policy version while it is"
            " published.",
            registry,
        )
        self.last_step = {gauge.name: measure(gauge.name, gauge.help, registry) for gauge in GAUGES}
        """Numbers of the last step, as the step record declares them, by the name of the metric."""
        self._declare_steps()
        self._declare_trajectories(lag_edges)
        self._declare_state()
        self._declare_checkpoints()

    def _declare_steps(self) -> None:
        registry = self.registry
        self.step_timestamp_s = measure(
            "vcpo_learner_step_timestamp_seconds",
            "Unix time at which the last optimizer step ended.",
            registry,
        )
        self.steps = Counter(
            "vcpo_learner_steps_total",
            "Optimizer steps taken, skipped ones included.",
            registry=registry,
        )
        self.skipped_steps = Counter(
            "vcpo_learner_skipped_steps_total",
            "Optimizer steps that made no update, by reason.",
            ("reason",),
            registry=registry,
        )
        start_at_zero(self.skipped_steps, SkipReason)
        self.rollbacks_refused = Counter(
            "vcpo_learner_rollbacks_refused_total",
            "Times that the run was to be rolled back and could not be: none was left, or no good"
            " checkpoint was old enough.",
            registry=registry,
        )
        self.step_duration_s = Histogram(
            "vcpo_learner_step_duration_seconds",
            "Time to compute and publish an update; the wait for its batch is not part of it.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.step_stage_s = Gauge(
            "vcpo_learner_step_stage_seconds",
            "Time from the step before to the last step, by stage of the learner's work.",
            ("stage",),
            registry=registry,
        )
        self.lag_ess_ratio = Gauge(
            "vcpo_lag_ess_ratio",
            "ESS ratio of the last step's trajectories by lag; the label is the bucket's smallest"
            " lag.",
            ("lag",),
            registry=registry,
        )
        self.reward_part = Gauge(
            "vcpo_reward_part",
            "Mean of each part of the last step's rewards; a response without a part has 0 of it.",
            ("part",),
            registry=registry,
        )

    def _declare_trajectories(self, lag_edges: Sequence[float]) -> None:
        registry = self.registry
        self.log_importance_weight = Histogram(
            "vcpo_log_importance_weight_nats",
            "Log importance weight of each consumed trajectory, before truncation.",
            buckets=_LOG_WEIGHT_BUCKETS,
            registry=registry,
        )
        self.reward = Histogram(
            "vcpo_reward",
            "Reward of each consumed trajectory; those outside 0 to 1 are in the outer buckets.",
            buckets=_REWARD_BUCKETS,
            registry=registry,
        )
        self.response_tokens = Histogram(
            "vcpo_response_tokens",
            "Sampled tokens of each consumed trajectory.",
            buckets=_LENGTH_BUCKETS,
            registry=registry,
        )
        self.policy_lag_steps = Histogram(
            "vcpo_policy_lag_steps",
            "Age of the oldest token of each consumed trajectory, in policy versions.",
            buckets=lag_edges,
            registry=registry,
        )
        self.leased = Counter(
            "vcpo_trajectories_leased_total", "Trajectories leased to workers.", registry=registry
        )
        self.dropped = Counter(
            "vcpo_trajectories_dropped_total",
            "Trajectories leased and not trained on, by reason.",
            ("reason",),
            registry=registry,
        )
        start_at_zero(self.dropped, DropReason)
        self.in_flight = Gauge(
            "vcpo_trajectories_in_flight",
            "Trajectories leased that have not arrived yet.",
            registry=registry,
        )
        self.buffered = Gauge(
            "vcpo_trajectories_buffered",
            "Trajectories accepted that wait for a batch.",
            registry=registry,
        )
        self.accounting_errors = Counter(
            "vcpo_accounting_errors_total",
            "Times that leased was not in flight + buffered + consumed + dropped: a bug.",
            registry=registry,
        )

    def _declare_state(self) -> None:
        registry = self.registry
        self.phase = Gauge(
            "vcpo_learner_phase",
            "1 for the phase that the run is in, 0 for the others.",
            ("phase",),
            registry=registry,
        )
        self.idle_ratio = measure(
            "vcpo_learner_idle_ratio",
            "Share of recent time in which the learner waited for data.",
            registry,
        )
        self.policy_version = measure(
            "vcpo_policy_version", "Newest policy version that the learner published.", registry
        )
        self.lag_limit_steps = measure(
            "vcpo_admission_lag_steps",
            "Lag limit in force, for new leases and for trained tokens.",
            registry,
        )
        self.batch_trajectories = measure(
            "vcpo_batch_trajectories", "Trajectories that one optimizer step consumes.", registry
        )
        self.failures_in_a_row = Gauge(
            "vcpo_failures_in_a_row",
            "Failed generations since the last accepted trajectory.",
            registry=registry,
        )
        self.workers = Gauge(
            "vcpo_workers",
            "Rollout workers that called the learner lately, by rollout group.",
            ("group",),
            registry=registry,
        )
        self.workers_set_aside = Counter(
            "vcpo_workers_set_aside_total",
            "Rollout workers that the learner took out of the run, by cause: failing or mismatch.",
            ("cause",),
            registry=registry,
        )
        start_at_zero(self.workers_set_aside, SetAsideCause)
        self.weights_served_bytes = Counter(
            "vcpo_weights_served_bytes_total",
            "Bytes of policy versions that the learner sent to workers, by form.",
            ("form",),
            registry=registry,
        )
        start_at_zero(self.weights_served_bytes, WeightForm)

    def _declare_checkpoints(self) -> None:
        registry = self.registry
        self.checkpoint_timestamp_s = measure(
            "vcpo_learner_checkpoint_timestamp_seconds",
            "Unix time of the newest checkpoint.",
            registry,
        )
        self.disk_free_bytes = measure(
            "vcpo_learner_disk_free_bytes",
            "Free bytes of the run's disk after the newest checkpoint.",
            registry,
        )
        self.checkpoint_bytes = measure(
            "vcpo_learner_checkpoint_bytes",
            "Size of a checkpoint, as the learner expects it.",
            registry,
        )
        self.lost_changes = measure(
            "vcpo_learner_lost_changes",
            "Changes committed to the redo log that the learner did not find when it started.",
            registry,
        )
        self.device_memory_bytes = Gauge(
            "vcpo_learner_device_memory_bytes",
            "Memory of the learner's GPU; peak is the most that was allocated.",
            ("state",),
            registry=registry,
        )
        self.evaluation_accuracy = measure(
            "vcpo_evaluation_accuracy",
            "Mean reward of the newest evaluation on held-out prompts.",
            registry,
        )
        self.evaluation_timestamp_s = measure(
            "vcpo_evaluation_timestamp_seconds",
            "Unix time at which the newest evaluation ended.",
            registry,
        )
        self.low_evaluations = Gauge(
            "vcpo_low_evaluations_in_a_row",
            "Evaluations in a row with less than 0.8 of the best accuracy before them, beyond"
            " chance.",
            registry=registry,
        )
