"""What a host, local or operator, exports for each of its runs."""

from __future__ import annotations

from vcpo.control.conditions import ConditionStatus
from vcpo.control.scaling import Direction
from vcpo.metrics.catalogue.declare import counter, gauge
from vcpo.metrics.label_values import (
    OrderResult,
    ProcessFault,
    ReplicaState,
    RunRole,
    SignalResult,
    SignalSource,
    ThrottleDirection,
)
from vcpo.metrics.metric import Feature, Label
from vcpo.records.step_chart import Unit

HOST_LABELS = (Label("namespace"), Label("run"))
"""First labels of each metric of a host, which has several runs."""

_CONDITION = Label("condition", at_most=8)

RUN_INFO = gauge(
    "vcpo_run_info",
    "Always 1; the labels name the model, the environment and the method.",
    *HOST_LABELS,
    Label("model"),
    Label("environment"),
    Label("method"),
    unit=Unit.FLAG,
)
RUN_STEPS = gauge("vcpo_run_steps", "Optimizer steps that the run's spec asks for.", *HOST_LABELS)
RUN_MAX_POLICY_LAG = gauge(
    "vcpo_run_max_policy_lag_steps",
    "Largest lag of a token that the run's spec allows, in policy versions.",
    *HOST_LABELS,
)
RUN_CHECKPOINT_INTERVAL = gauge(
    "vcpo_run_checkpoint_interval_steps",
    "Optimizer steps from one checkpoint to the next, as the run's spec asks for.",
    *HOST_LABELS,
)
RUN_LAG_LIMIT = gauge(
    "vcpo_run_admission_lag_steps",
    "Lag limit that the host has set; below the spec's while the run is throttled.",
    *HOST_LABELS,
)
RUN_ESS_FLOOR = gauge(
    "vcpo_run_ess_floor_ratio",
    "Share of the on-policy ESS ratio below which the host throttles.",
    *HOST_LABELS,
)
RUN_THROTTLES = counter(
    "vcpo_run_throttles_total",
    "Changes of the lag limit by the host, by direction.",
    *HOST_LABELS,
    Label("direction", tuple(ThrottleDirection)),
)
RUN_THROTTLE_ORDERS = counter(
    "vcpo_run_throttle_orders_total",
    "Orders to the learner to change its lag limit, by result.",
    *HOST_LABELS,
    Label("result", tuple(OrderResult)),
)
RUN_DECISIONS = counter(
    "vcpo_run_decisions_total",
    "Changes of the decision about the number of workers, by its direction and reason.",
    *HOST_LABELS,
    Label("direction", tuple(Direction)),
    Label("reason", at_most=5),
)
RUN_CONDITION = gauge(
    "vcpo_run_condition",
    "1 for the current status of a condition, 0 for the others.",
    *HOST_LABELS,
    _CONDITION,
    Label("status", tuple(ConditionStatus)),
    unit=Unit.FLAG,
)
RUN_CONDITION_REASON = gauge(
    "vcpo_run_condition_reason",
    "1 for the current reason of a condition; other reasons are absent.",
    *HOST_LABELS,
    _CONDITION,
    Label("reason"),
    unit=Unit.FLAG,
)
RUN_REPLICAS = gauge(
    "vcpo_run_replicas",
    "Rollout workers of a rollout group, by state: desired or ready.",
    *HOST_LABELS,
    Label("group", at_most=8),
    Label("state", tuple(ReplicaState)),
)
RUN_FAILURES = counter(
    "vcpo_run_process_failures_total",
    "Processes of a run that failed, by role (learner, rollout) and cause (ended, hung).",
    *HOST_LABELS,
    Label("role", tuple(RunRole)),
    Label("cause", tuple(ProcessFault)),
    appears_with=Feature.LOCAL,
)
RUN_LEARNER_RESTARTS = counter(
    "vcpo_run_learner_restarts_total", "Times that the run's learner was restarted.", *HOST_LABELS
)
RUN_SIGNALS_AGE = gauge(
    "vcpo_run_signals_age_seconds",
    "Age of the newest signals of the learner that the host has.",
    *HOST_LABELS,
)
RUN_SIGNAL_REQUESTS = counter(
    "vcpo_run_signal_requests_total",
    "Requests for the learner's signals, by source and result.",
    *HOST_LABELS,
    Label("source", tuple(SignalSource)),
    Label("result", tuple(SignalResult)),
)
RUN_START_TIMESTAMP = gauge(
    "vcpo_run_start_timestamp_seconds",
    "Unix time at which the run was started, resumed or retried last.",
    *HOST_LABELS,
)
RUN_STARTUP_DEADLINE = gauge(
    "vcpo_run_startup_deadline_timestamp_seconds",
    "Unix time at which the run fails unless it has taken a step; absent once it has.",
    *HOST_LABELS,
    appears_with=Feature.STARTING,
)

HOST = (
    RUN_INFO,
    RUN_STEPS,
    RUN_CHECKPOINT_INTERVAL,
    RUN_MAX_POLICY_LAG,
    RUN_LAG_LIMIT,
    RUN_ESS_FLOOR,
    RUN_THROTTLES,
    RUN_THROTTLE_ORDERS,
    RUN_DECISIONS,
    RUN_CONDITION,
    RUN_CONDITION_REASON,
    RUN_REPLICAS,
    RUN_FAILURES,
    RUN_LEARNER_RESTARTS,
    RUN_SIGNALS_AGE,
    RUN_SIGNAL_REQUESTS,
    RUN_START_TIMESTAMP,
    RUN_STARTUP_DEADLINE,
)
"""Metrics that a host exports for its runs, besides `every_part`."""
