"""What a learner exports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from prometheus_client import Gauge

from vcpo.algo.health.lag_breakdown import LAG_BUCKETS
from vcpo.api.algorithm import Algorithm
from vcpo.control.quota import Trust
from vcpo.metrics.label_values import (
    MemoryState,
    Stage,
    WeightForm,
)
from vcpo.metrics.metric import (
    Feature,
    Label,
    Metric,
    batch_histogram,
    counter,
    declared_metrics,
    gauge,
    histogram,
    measure,
    unit_in_name,
)
from vcpo.metrics.registry import RPC_DURATION, RPC_REQUESTS, Instruments, PartRegistry
from vcpo.records.reasons import DropReason, SetAsideCause, SkipReason
from vcpo.records.step_chart import Unit
from vcpo.records.step_record import GAUGES
from vcpo.wire.call_meter import CallMeter
from vcpo.wire.guard import CallRefusal
from vcpo.wire.limits import MAX_REWARD_PARTS
from vcpo.wire.phase import RunPhase

_STEP_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0, 1800.0)
_LOG_WEIGHT_BUCKETS = (-8.0, -4.0, -2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_REWARD_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_DROP_REASON = Label("reason", tuple(DropReason))
_FEATURES: Final = {
    "vcpo_top_gradient_ratio": Feature.GRADIENT_NORMS,
    "vcpo_baseline_weight_concentration_ratio": Feature.GRADIENT_NORMS,
    "vcpo_learner_mfu_ratio": Feature.GPU,
    "vcpo_gpu_seconds": Feature.GPU,
    "vcpo_learner_gpu_tokens_per_second": Feature.GPU,
    "vcpo_worker_gpu_tokens_per_second": Feature.GPU,
}
"""What numbers of a step need; norms are none where all rewards of every group are equal."""

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


STEP_GAUGES: dict[str, Metric[Gauge]] = {
    one.name: measure(
        one.name,
        one.help,
        unit=one.unit or unit_in_name(one.name),
        appears_with=_FEATURES.get(one.name),
    )
    for _, one in GAUGES
}
"""Numbers of the last step, as the step record declares them."""


class LearnerMetrics(Instruments):
    """What a learner exports.

    lag_edges: bucket edges of the lag for this run's spec; those of the default spec if not given.
    An edge at the largest possible value keeps every quantile at or below it.
    """

    # Exported first and set last: a scrape beside a step then never has the new step with old
    # numbers, by which the operator would judge it.
    step = measure(
        "vcpo_learner_step",
        "Optimizer step whose numbers are shown; behind the policy version while it is published.",
    )
    step_timestamp_s = measure(
        "vcpo_learner_step_timestamp_seconds", "Unix time at which the last optimizer step ended."
    )
    steps = counter("vcpo_learner_steps_total", "Optimizer steps taken, skipped ones included.")
    skipped_steps = counter(
        "vcpo_learner_skipped_steps_total",
        "Optimizer steps that made no update, by reason.",
        Label("reason", tuple(SkipReason)),
    )
    skipped_steps_in_a_row = gauge(
        "vcpo_skipped_steps_in_a_row", "Optimizer steps since the last one that made an update."
    )
    rollbacks_refused = counter(
        "vcpo_learner_rollbacks_refused_total",
        "Times that the run was to be rolled back and could not be: none was left, or no good "
        "checkpoint was old enough.",
    )
    restored_step = gauge(
        "vcpo_learner_restored_step",
        "Step of the checkpoint that this learner resumed from; 0 if it began the run.",
    )
    step_duration_s = histogram(
        "vcpo_learner_step_duration_seconds",
        "Time to compute and publish an update; the wait for its batch is not part of it.",
        _STEP_BUCKETS,
    )
    step_stage_s = gauge(
        "vcpo_learner_step_stage_seconds",
        "Time from the step before to the last step, by stage of the learner's work.",
        Label("stage", tuple(Stage)),
    )
    idle_ratio = measure(
        "vcpo_learner_idle_ratio", "Share of recent time in which the learner waited for data."
    )
    phase = gauge(
        "vcpo_learner_phase",
        "1 for the phase that the run is in, 0 for the others.",
        Label("phase", tuple(RunPhase)),
        unit=Unit.FLAG,
    )
    checkpoint_timestamp_s = measure(
        "vcpo_learner_checkpoint_timestamp_seconds",
        "Unix time of the newest checkpoint.",
        appears_with=Feature.CHECKPOINT,
    )
    disk_free_bytes = measure(
        "vcpo_learner_disk_free_bytes",
        "Free bytes of the run's disk after the newest checkpoint.",
        appears_with=Feature.CHECKPOINT,
    )
    checkpoint_bytes = measure(
        "vcpo_learner_checkpoint_bytes",
        "Size of a checkpoint, as the learner expects it.",
        appears_with=Feature.CHECKPOINT,
    )
    disk_full = counter(
        "vcpo_learner_disk_full_total",
        "Attempts to write a checkpoint or the model that failed because the disk was full.",
    )
    lost_changes = measure(
        "vcpo_learner_lost_changes",
        "Changes committed to the redo log that the learner did not find when it started.",
        unit=Unit.COUNT,
    )
    device_memory_bytes = gauge(
        "vcpo_learner_device_memory_bytes",
        "Memory of the learner's GPU; peak is the most that was allocated.",
        Label("state", tuple(MemoryState)),
        appears_with=Feature.GPU,
    )
    ess_ratio_mean = measure("vcpo_ess_mean_ratio", "Mean ESS ratio in a window of recent steps.")
    ess_ratio_low = measure(
        "vcpo_ess_low_ratio", "Tenth percentile of the ESS ratio in a window of recent steps."
    )
    lag_ess_ratio = gauge(
        "vcpo_lag_ess_ratio",
        "ESS ratio of the last step's trajectories by lag; the label is the bucket's smallest lag.",
        Label("lag", at_most=len(LAG_BUCKETS)),
    )
    mismatch_by_engine = gauge(
        "vcpo_mismatch_engine_nats",
        "Mean absolute log pi - log mu of fresh tokens of the median worker, by engine.",
        Label("engine", at_most=8),
    )
    mismatch_by_position = gauge(
        "vcpo_mismatch_position_nats",
        "Mean absolute log pi - log mu of fresh tokens, by position in the answer: the first of a "
        "bin.",
        Label("position", at_most=12),
    )
    log_importance_weight = batch_histogram(
        "vcpo_log_importance_weight_nats",
        "Log importance weight of each consumed trajectory, before truncation.",
        _LOG_WEIGHT_BUCKETS,
    )
    reward = batch_histogram(
        "vcpo_reward",
        "Reward of each consumed trajectory; those outside 0 to 1 are in the outer two buckets.",
        _REWARD_BUCKETS,
        unit=Unit.REWARD,
    )
    reward_part = gauge(
        "vcpo_reward_part",
        "Mean of each part of the last step's rewards; a response without a part has 0 of it.",
        Label("part", at_most=MAX_REWARD_PARTS),
        unit=Unit.REWARD,
        appears_with=Feature.REWARD_PARTS,
    )
    policy_lag_steps = batch_histogram(
        "vcpo_policy_lag_steps",
        "Age of the oldest token of each consumed trajectory, in policy versions.",
        lag_edges(Algorithm().max_policy_lag_steps),
    )
    token_lag_median_steps = measure(
        "vcpo_token_lag_median_steps", "Median age of the last step's tokens, in policy versions."
    )
    token_lag_max_steps = measure(
        "vcpo_token_lag_max_steps", "Largest age of a token of the last step, in policy versions."
    )
    policy_version = measure(
        "vcpo_policy_version",
        "Newest policy version that the learner published.",
        not_shown=(
            "the operator reads it; boards show vcpo_learner_step, which it leads by at most 1"
        ),
    )
    lag_limit_steps = measure(
        "vcpo_admission_lag_steps", "Lag limit in force, for new leases and for trained tokens."
    )
    batch_trajectories = measure(
        "vcpo_batch_trajectories", "Trajectories that one optimizer step consumes."
    )
    leased = counter("vcpo_trajectories_leased_total", "Trajectories leased to workers.")
    consumed = counter(
        "vcpo_trajectories_consumed_total",
        "Trajectories trained on.",
        not_shown="vcpo_batch_trajectories for each step; it is there to add up the accounting",
    )
    dropped = counter(
        "vcpo_trajectories_dropped_total",
        "Trajectories leased and not trained on, by reason.",
        _DROP_REASON,
    )
    wasted_tokens = counter(
        "vcpo_tokens_wasted_total",
        "Sampled tokens that reached the learner and were not trained on, by reason.",
        _DROP_REASON,
    )
    in_flight = gauge(
        "vcpo_trajectories_in_flight",
        "Trajectories leased that have not arrived yet.",
        unit=Unit.TRAJECTORIES,
    )
    buffered = gauge(
        "vcpo_trajectories_buffered",
        "Trajectories accepted that wait for a batch.",
        unit=Unit.TRAJECTORIES,
    )
    accounting_errors = counter(
        "vcpo_accounting_errors_total",
        "Times that leased was not in flight + buffered + consumed + dropped; above 0 is a bug.",
    )
    failures_in_a_row = gauge(
        "vcpo_failures_in_a_row", "Failed generations since the last accepted trajectory."
    )
    workers = gauge(
        "vcpo_workers",
        "Rollout workers that called the learner lately, by rollout group.",
        Label("group", at_most=8),
    )
    workers_by_trust = gauge(
        "vcpo_workers_by_trust",
        "Rollout workers by trust: trusted (delivered), new, doubted (let a lease expire).",
        Label("trust", tuple(Trust)),
    )
    workers_set_aside = counter(
        "vcpo_workers_set_aside_total",
        "Rollout workers that the learner took out of the run, by cause: failing or mismatch.",
        Label("cause", tuple(SetAsideCause)),
    )
    calls_refused = counter(
        "vcpo_learner_calls_refused_total",
        "Calls refused: key, role, identity (another's name or lease), calls, deadline, message, "
        "connections, stalled.",
        Label("reason", tuple(CallRefusal)),
    )
    weights_served_bytes = counter(
        "vcpo_weights_served_bytes_total",
        "Bytes of policy versions that the learner sent to workers, by form.",
        Label("form", tuple(WeightForm)),
    )
    evaluation_accuracy = measure(
        "vcpo_evaluation_accuracy",
        "Mean reward of the newest evaluation on held-out prompts.",
        unit=Unit.REWARD,
        appears_with=Feature.EVALUATION,
    )
    evaluation_timestamp_s = measure(
        "vcpo_evaluation_timestamp_seconds",
        "Unix time at which the newest evaluation ended.",
        appears_with=Feature.EVALUATION,
    )
    low_evaluations = gauge(
        "vcpo_low_evaluations_in_a_row",
        "Evaluations in a row with less than 0.8 of the best accuracy before them, beyond chance.",
    )
    sink_dropped = counter(
        "vcpo_sink_dropped_total",
        "Records that a sink did not get, because it was slow or failed, by sink.",
        Label("sink", at_most=8),
        appears_with=Feature.SINKS,
    )

    def __init__(self, *, run: str, lag_edges: Sequence[float] = ()) -> None:
        part = PartRegistry("learner", {"run": run})
        super().__init__(part, {LearnerMetrics.policy_lag_steps.name: lag_edges})
        self.last_step = {name: part.make(metric) for name, metric in STEP_GAUGES.items()}
        """Numbers of the last step, by the name of the metric."""
        self.calls = CallMeter(part.make(RPC_REQUESTS), part.make(RPC_DURATION))


LEARNER = (*declared_metrics(LearnerMetrics), *STEP_GAUGES.values())
"""Metrics of a learner, besides those of every part."""
