"""What a learner exports."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from vcpo.metrics.label_values import WeightForm
from vcpo.metrics.registry import PartRegistry
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
        self.step = registry.measure(
            "vcpo_learner_step",
            "Optimizer step whose numbers are shown; behind the policy version while it is"
            " published.",
        )
        self.last_step = {gauge.name: registry.measure(gauge.name, gauge.help) for gauge in GAUGES}
        """Numbers of the last step, as the step record declares them, by the name of the metric."""
        self._declare_steps()
        self._declare_trajectories(lag_edges)
        self._declare_state()
        self._declare_checkpoints()

    def _declare_steps(self) -> None:
        registry = self.registry
        self.step_timestamp_s = registry.measure(
            "vcpo_learner_step_timestamp_seconds",
            "Unix time at which the last optimizer step ended.",
        )
        self.steps = registry.counter(
            "vcpo_learner_steps_total", "Optimizer steps taken, skipped ones included."
        )
        self.skipped_steps = registry.counter(
            "vcpo_learner_skipped_steps_total",
            "Optimizer steps that made no update, by reason.",
            reason=SkipReason,
        )
        self.rollbacks_refused = registry.counter(
            "vcpo_learner_rollbacks_refused_total",
            "Times that the run was to be rolled back and could not be: none was left, or no good"
            " checkpoint was old enough.",
        )
        self.step_duration_s = registry.histogram(
            "vcpo_learner_step_duration_seconds",
            "Time to compute and publish an update; the wait for its batch is not part of it.",
            buckets=_STEP_BUCKETS,
        )
        self.step_stage_s = registry.gauge(
            "vcpo_learner_step_stage_seconds",
            "Time from the step before to the last step, by stage of the learner's work.",
            "stage",
        )
        self.lag_ess_ratio = registry.gauge(
            "vcpo_lag_ess_ratio",
            "ESS ratio of the last step's trajectories by lag; the label is the bucket's smallest"
            " lag.",
            "lag",
        )
        self.reward_part = registry.gauge(
            "vcpo_reward_part",
            "Mean of each part of the last step's rewards; a response without a part has 0 of it.",
            "part",
        )

    def _declare_trajectories(self, lag_edges: Sequence[float]) -> None:
        registry = self.registry
        self.log_importance_weight = registry.histogram(
            "vcpo_log_importance_weight_nats",
            "Log importance weight of each consumed trajectory, before truncation.",
            buckets=_LOG_WEIGHT_BUCKETS,
        )
        self.reward = registry.histogram(
            "vcpo_reward",
            "Reward of each consumed trajectory; those outside 0 to 1 are in the outer buckets.",
            buckets=_REWARD_BUCKETS,
        )
        self.response_tokens = registry.histogram(
            "vcpo_response_tokens",
            "Sampled tokens of each consumed trajectory.",
            buckets=_LENGTH_BUCKETS,
        )
        self.policy_lag_steps = registry.histogram(
            "vcpo_policy_lag_steps",
            "Age of the oldest token of each consumed trajectory, in policy versions.",
            buckets=lag_edges,
        )
        self.leased = registry.counter(
            "vcpo_trajectories_leased_total", "Trajectories leased to workers."
        )
        self.dropped = registry.counter(
            "vcpo_trajectories_dropped_total",
            "Trajectories leased and not trained on, by reason.",
            reason=DropReason,
        )
        self.in_flight = registry.gauge(
            "vcpo_trajectories_in_flight", "Trajectories leased that have not arrived yet."
        )
        self.buffered = registry.gauge(
            "vcpo_trajectories_buffered", "Trajectories accepted that wait for a batch."
        )
        self.accounting_errors = registry.counter(
            "vcpo_accounting_errors_total",
            "Times that leased was not in flight + buffered + consumed + dropped: a bug.",
        )

    def _declare_state(self) -> None:
        registry = self.registry
        self.phase = registry.gauge(
            "vcpo_learner_phase", "1 for the phase that the run is in, 0 for the others.", "phase"
        )
        self.idle_ratio = registry.measure(
            "vcpo_learner_idle_ratio", "Share of recent time in which the learner waited for data."
        )
        self.policy_version = registry.measure(
            "vcpo_policy_version", "Newest policy version that the learner published."
        )
        self.lag_limit_steps = registry.measure(
            "vcpo_admission_lag_steps", "Lag limit in force, for new leases and for trained tokens."
        )
        self.batch_trajectories = registry.measure(
            "vcpo_batch_trajectories", "Trajectories that one optimizer step consumes."
        )
        self.failures_in_a_row = registry.gauge(
            "vcpo_failures_in_a_row", "Failed generations since the last accepted trajectory."
        )
        self.workers = registry.gauge(
            "vcpo_workers",
            "Rollout workers that called the learner lately, by rollout group.",
            "group",
        )
        self.workers_set_aside = registry.counter(
            "vcpo_workers_set_aside_total",
            "Rollout workers that the learner took out of the run, by cause: failing or mismatch.",
            cause=SetAsideCause,
        )
        self.weights_served_bytes = registry.counter(
            "vcpo_weights_served_bytes_total",
            "Bytes of policy versions that the learner sent to workers, by form.",
            form=WeightForm,
        )

    def _declare_checkpoints(self) -> None:
        registry = self.registry
        self.checkpoint_timestamp_s = registry.measure(
            "vcpo_learner_checkpoint_timestamp_seconds", "Unix time of the newest checkpoint."
        )
        self.disk_free_bytes = registry.measure(
            "vcpo_learner_disk_free_bytes",
            "Free bytes of the run's disk after the newest checkpoint.",
        )
        self.checkpoint_bytes = registry.measure(
            "vcpo_learner_checkpoint_bytes", "Size of a checkpoint, as the learner expects it."
        )
        self.lost_changes = registry.measure(
            "vcpo_learner_lost_changes",
            "Changes committed to the redo log that the learner did not find when it started.",
        )
        self.device_memory_bytes = registry.gauge(
            "vcpo_learner_device_memory_bytes",
            "Memory of the learner's GPU; peak is the most that was allocated.",
            "state",
        )
        self.evaluation_accuracy = registry.measure(
            "vcpo_evaluation_accuracy", "Mean reward of the newest evaluation on held-out prompts."
        )
        self.evaluation_timestamp_s = registry.measure(
            "vcpo_evaluation_timestamp_seconds", "Unix time at which the newest evaluation ended."
        )
        self.low_evaluations = registry.gauge(
            "vcpo_low_evaluations_in_a_row",
            "Evaluations in a row with less than 0.8 of the best accuracy before them, beyond"
            " chance.",
        )
