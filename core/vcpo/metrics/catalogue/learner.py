"""What a learner exports."""

from __future__ import annotations

from vcpo.api.algorithm import Algorithm, Sampling
from vcpo.control.quota import Trust
from vcpo.metrics.catalogue.declare import counter, gauge, histogram, measure
from vcpo.metrics.catalogue.edges import lag_edges, response_token_edges
from vcpo.metrics.label_values import (
    GroupOutcome,
    MemoryState,
    Stage,
    WeightForm,
)
from vcpo.metrics.metric import Feature, Label
from vcpo.records.reasons import DropReason, SetAsideCause, SkipReason
from vcpo.records.step_chart import Unit
from vcpo.records.step_record import GAUGES
from vcpo.wire.guard import CallRefusal
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import FinishReason

_STEP_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0, 1800.0)
_LOG_WEIGHT_BUCKETS = (-8.0, -4.0, -2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_REWARD_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_DROP_REASON = Label("reason", tuple(DropReason))
_FROM_NORMS = frozenset({"top_gradient_share", "baseline_weight_concentration"})
"""Diagnostics that need gradient norms: none where all rewards of every group are equal."""

STEP = measure(
    "vcpo_learner_step",
    "Optimizer step whose numbers are shown; behind the policy version while it is published.",
)
STEP_TIMESTAMP = measure(
    "vcpo_learner_step_timestamp_seconds", "Unix time at which the last optimizer step ended."
)
STEPS = counter("vcpo_learner_steps_total", "Optimizer steps taken, skipped ones included.")
SKIPPED_STEPS = counter(
    "vcpo_learner_skipped_steps_total",
    "Optimizer steps that made no update, by reason.",
    Label("reason", tuple(SkipReason)),
)
SKIPPED_STEPS_IN_A_ROW = gauge(
    "vcpo_skipped_steps_in_a_row", "Optimizer steps since the last one that made an update."
)
RESTORED_STEP = gauge(
    "vcpo_learner_restored_step",
    "Step of the checkpoint that this learner resumed from; 0 if it began the run.",
)
STEP_DURATION = histogram(
    "vcpo_learner_step_duration_seconds",
    "Time to compute and publish an update; the wait for its batch is not part of it.",
    _STEP_BUCKETS,
)
STAGE_SECONDS = counter(
    "vcpo_learner_stage_seconds_total",
    "Time that the learner spent, by stage of its work.",
    Label("stage", tuple(Stage)),
)
TOKENS = counter("vcpo_learner_tokens_total", "Response tokens trained on.")
IDLE = measure(
    "vcpo_learner_idle_ratio", "Share of recent time in which the learner waited for data."
)
PHASE = gauge(
    "vcpo_learner_phase",
    "1 for the phase that the run is in, 0 for the others.",
    Label("phase", tuple(RunPhase)),
    unit=Unit.FLAG,
)
CHECKPOINT_TIMESTAMP = measure(
    "vcpo_learner_checkpoint_timestamp_seconds",
    "Unix time of the newest checkpoint.",
    appears_with=Feature.CHECKPOINT,
)
DISK_FULL = counter(
    "vcpo_learner_disk_full_total",
    "Attempts to write a checkpoint or the model that failed because the disk was full.",
)
LOST_CHANGES = measure(
    "vcpo_learner_lost_changes",
    "Changes committed to the redo log that the learner did not find when it started.",
    unit=Unit.COUNT,
)
DEVICE_MEMORY = gauge(
    "vcpo_learner_device_memory_bytes",
    "Memory of the learner's GPU; peak is the most that was allocated.",
    Label("state", tuple(MemoryState)),
    appears_with=Feature.GPU,
)

ESS_MEAN = measure("vcpo_ess_mean_ratio", "Mean ESS ratio in a window of recent steps.")
ESS_LOW = measure(
    "vcpo_ess_low_ratio", "Tenth percentile of the ESS ratio in a window of recent steps."
)
STEP_GAUGES = {
    one.name: measure(
        one.name,
        one.help,
        unit=one.unit,
        appears_with=Feature.GRADIENT_NORMS if one.entry in _FROM_NORMS else None,
    )
    for _, one in GAUGES
}
"""Numbers of the last step, as the step record declares them."""
LAG_ESS = gauge(
    "vcpo_lag_ess_ratio",
    "ESS ratio of the last step's trajectories by lag; the label is the bucket's smallest lag.",
    Label("lag", at_most=12),
)
MISMATCH_BY_ENGINE = gauge(
    "vcpo_mismatch_engine_nats",
    "Mean absolute log pi - log mu of fresh tokens of the median worker, by engine.",
    Label("engine", at_most=8),
)
MISMATCH_BY_POSITION = gauge(
    "vcpo_mismatch_position_nats",
    "Mean absolute log pi - log mu of fresh tokens, by position in the answer: the first of a bin.",
    Label("position", at_most=12),
)
LOG_IMPORTANCE_WEIGHT = histogram(
    "vcpo_log_importance_weight_nats",
    "Log importance weight of each consumed trajectory, before truncation.",
    _LOG_WEIGHT_BUCKETS,
)
REWARD = histogram(
    "vcpo_reward",
    "Reward of each consumed trajectory; those outside 0 to 1 are in the outer two buckets.",
    _REWARD_BUCKETS,
    unit=Unit.REWARD,
)
RESPONSE_TOKENS = histogram(
    "vcpo_response_tokens",
    "Sampled tokens of each consumed trajectory.",
    response_token_edges(Sampling().max_new_tokens),
)
GROUPS = counter(
    "vcpo_groups_total",
    "Groups consumed, by whether their rewards differ; equal rewards teach nothing.",
    Label("outcome", tuple(GroupOutcome)),
)
RESPONSES = counter(
    "vcpo_responses_total",
    "Responses consumed, by ending: an end token or a stop string, or the largest length.",
    Label("ending", tuple(FinishReason)),
)
POLICY_LAG = histogram(
    "vcpo_policy_lag_steps",
    "Age of the oldest token of each consumed trajectory, in policy versions.",
    lag_edges(Algorithm().max_policy_lag_steps),
)
TOKEN_LAG_MEDIAN = measure(
    "vcpo_token_lag_median_steps", "Median age of the last step's tokens, in policy versions."
)
TOKEN_LAG_MAX = measure(
    "vcpo_token_lag_max_steps", "Largest age of a token of the last step, in policy versions."
)
POLICY_VERSION = measure(
    "vcpo_policy_version",
    "Newest policy version that the learner published.",
    not_shown="the operator reads it; boards show vcpo_learner_step, which it leads by at most 1",
)
LAG_LIMIT = measure(
    "vcpo_admission_lag_steps", "Lag limit in force, for new leases and for trained tokens."
)
BATCH_TRAJECTORIES = measure(
    "vcpo_batch_trajectories", "Trajectories that one optimizer step consumes."
)
TRAJECTORIES_LEASED = counter("vcpo_trajectories_leased_total", "Trajectories leased to workers.")
TRAJECTORIES_CONSUMED = counter(
    "vcpo_trajectories_consumed_total",
    "Trajectories trained on.",
    not_shown="vcpo_batch_trajectories for each step; it is there to add up the accounting",
)
TRAJECTORIES_DROPPED = counter(
    "vcpo_trajectories_dropped_total",
    "Trajectories leased and not trained on, by reason.",
    _DROP_REASON,
)
TOKENS_WASTED = counter(
    "vcpo_tokens_wasted_total",
    "Sampled tokens that reached the learner and were not trained on, by reason.",
    _DROP_REASON,
)
TRAJECTORIES_IN_FLIGHT = gauge(
    "vcpo_trajectories_in_flight",
    "Trajectories leased that have not arrived yet.",
    unit=Unit.TRAJECTORIES,
)
TRAJECTORIES_BUFFERED = gauge(
    "vcpo_trajectories_buffered",
    "Trajectories accepted that wait for a batch.",
    unit=Unit.TRAJECTORIES,
)
ACCOUNTING_ERRORS = counter(
    "vcpo_accounting_errors_total",
    "Times that leased was not in flight + buffered + consumed + dropped; above 0 is a bug.",
)
FAILURES_IN_A_ROW = gauge(
    "vcpo_failures_in_a_row", "Failed generations since the last accepted trajectory."
)
WORKERS = gauge(
    "vcpo_workers",
    "Rollout workers that called the learner lately, by rollout group.",
    Label("group", at_most=8),
)
WORKERS_BY_TRUST = gauge(
    "vcpo_workers_by_trust",
    "Rollout workers by trust: trusted (delivered), new, doubted (let a lease expire).",
    Label("trust", tuple(Trust)),
)
WORKERS_SET_ASIDE = counter(
    "vcpo_workers_set_aside_total",
    "Rollout workers that the learner took out of the run, by cause: failing or mismatch.",
    Label("cause", tuple(SetAsideCause)),
)
CALLS_REFUSED = counter(
    "vcpo_learner_calls_refused_total",
    "Calls refused: key, role, identity (another's name or lease), calls, deadline, message, "
    "connections, stalled.",
    Label("reason", tuple(CallRefusal)),
)
WEIGHTS_SERVED = counter(
    "vcpo_weights_served_bytes_total",
    "Bytes of policy versions that the learner sent to workers, by form.",
    Label("form", tuple(WeightForm)),
)
EVALUATION_ACCURACY = measure(
    "vcpo_evaluation_accuracy",
    "Mean reward of the newest evaluation on held-out prompts.",
    unit=Unit.REWARD,
    appears_with=Feature.EVALUATION,
)
EVALUATION_TIMESTAMP = measure(
    "vcpo_evaluation_timestamp_seconds",
    "Unix time at which the newest evaluation ended.",
    appears_with=Feature.EVALUATION,
)
SINK_DROPPED = counter(
    "vcpo_sink_dropped_total",
    "Records that a sink did not get, because it was slow or failed, by sink.",
    Label("sink", at_most=8),
    appears_with=Feature.SINKS,
)

LEARNER = (
    STEP,
    STEP_TIMESTAMP,
    STEPS,
    SKIPPED_STEPS,
    SKIPPED_STEPS_IN_A_ROW,
    RESTORED_STEP,
    STEP_DURATION,
    STAGE_SECONDS,
    TOKENS,
    IDLE,
    PHASE,
    CHECKPOINT_TIMESTAMP,
    DISK_FULL,
    LOST_CHANGES,
    DEVICE_MEMORY,
    *STEP_GAUGES.values(),
    ESS_MEAN,
    ESS_LOW,
    LAG_ESS,
    MISMATCH_BY_ENGINE,
    MISMATCH_BY_POSITION,
    LOG_IMPORTANCE_WEIGHT,
    REWARD,
    RESPONSE_TOKENS,
    GROUPS,
    RESPONSES,
    POLICY_LAG,
    TOKEN_LAG_MEDIAN,
    TOKEN_LAG_MAX,
    POLICY_VERSION,
    LAG_LIMIT,
    BATCH_TRAJECTORIES,
    TRAJECTORIES_LEASED,
    TRAJECTORIES_CONSUMED,
    TRAJECTORIES_DROPPED,
    TOKENS_WASTED,
    TRAJECTORIES_IN_FLIGHT,
    TRAJECTORIES_BUFFERED,
    ACCOUNTING_ERRORS,
    FAILURES_IN_A_ROW,
    WORKERS,
    WORKERS_BY_TRUST,
    WORKERS_SET_ASIDE,
    CALLS_REFUSED,
    WEIGHTS_SERVED,
    EVALUATION_ACCURACY,
    EVALUATION_TIMESTAMP,
    SINK_DROPPED,
)
"""Metrics of a learner, besides `every_part`."""
