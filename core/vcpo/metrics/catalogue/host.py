"""What a host, local or operator, exports for each of its runs."""

from __future__ import annotations

from vcpo.control.conditions import ConditionStatus
from vcpo.control.scaling import Direction
from vcpo.metrics.label_values import (
    OrderResult,
    ProcessFault,
    ReplicaState,
    RunRole,
    SignalResult,
    SignalSource,
    ThrottleDirection,
)
from vcpo.metrics.metric import Feature, Label, counter, declared_metrics, gauge, label_values
from vcpo.metrics.registry import Instruments, PartRegistry
from vcpo.records.step_chart import Unit

HOST_LABELS = (Label("namespace"), Label("run"))
"""First labels of each metric of a host, which has several runs."""

_CONDITION = Label("condition", at_most=8)


class HostMetrics(Instruments):
    """What a host exports for all of its runs; `hosted_runs` sets the gauges."""

    run_info = gauge(
        "vcpo_run_info",
        "Always 1; the labels name model, environment and method, and the run's owner and team.",
        *HOST_LABELS,
        Label("model"),
        Label("environment"),
        Label("method"),
        Label("owner"),
        Label("team"),
        unit=Unit.FLAG,
    )
    run_steps = gauge(
        "vcpo_run_steps", "Optimizer steps that the run's spec asks for.", *HOST_LABELS
    )
    run_max_policy_lag = gauge(
        "vcpo_run_max_policy_lag_steps",
        "Largest lag of a token that the run's spec allows, in policy versions.",
        *HOST_LABELS,
    )
    run_checkpoint_interval = gauge(
        "vcpo_run_checkpoint_interval_steps",
        "Optimizer steps from one checkpoint to the next, as the run's spec asks for.",
        *HOST_LABELS,
    )
    run_lag_limit = gauge(
        "vcpo_run_admission_lag_steps",
        "Lag limit that the host has set; below the spec's while the run is throttled.",
        *HOST_LABELS,
    )
    run_ess_floor = gauge(
        "vcpo_run_ess_floor_ratio",
        "Share of the on-policy ESS ratio below which the host throttles.",
        *HOST_LABELS,
    )
    throttles = counter(
        "vcpo_run_throttles_total",
        "Changes of the lag limit by the host, by direction.",
        *HOST_LABELS,
        Label("direction", tuple(ThrottleDirection)),
    )
    throttle_orders = counter(
        "vcpo_run_throttle_orders_total",
        "Orders to the learner to change its lag limit, by result.",
        *HOST_LABELS,
        Label("result", tuple(OrderResult)),
    )
    decisions = counter(
        "vcpo_run_decisions_total",
        "Changes of the decision about the number of workers, by its direction and reason.",
        *HOST_LABELS,
        Label("direction", tuple(Direction)),
        Label("reason", at_most=5),
    )
    run_condition = gauge(
        "vcpo_run_condition",
        "1 for the current status of a condition, 0 for the others.",
        *HOST_LABELS,
        _CONDITION,
        Label("status", tuple(ConditionStatus)),
        unit=Unit.FLAG,
    )
    run_condition_reason = gauge(
        "vcpo_run_condition_reason",
        "1 for the current reason of a condition; other reasons are absent.",
        *HOST_LABELS,
        _CONDITION,
        Label("reason"),
        unit=Unit.FLAG,
    )
    run_replicas = gauge(
        "vcpo_run_replicas",
        "Rollout workers of a rollout group, by state: desired or ready.",
        *HOST_LABELS,
        Label("group", at_most=8),
        Label("state", tuple(ReplicaState)),
    )
    failures = counter(
        "vcpo_run_process_failures_total",
        "Processes of a run that failed, by role (learner, rollout) and cause (ended, hung).",
        *HOST_LABELS,
        Label("role", tuple(RunRole)),
        Label("cause", tuple(ProcessFault)),
        appears_with=Feature.LOCAL,
    )
    learner_restarts = counter(
        "vcpo_run_learner_restarts_total",
        "Times that the run's learner was restarted.",
        *HOST_LABELS,
    )
    run_signals_age = gauge(
        "vcpo_run_signals_age_seconds",
        "Age of the newest signals of the learner that the host has.",
        *HOST_LABELS,
    )
    signal_requests = counter(
        "vcpo_run_signal_requests_total",
        "Requests for the learner's signals, by source and result.",
        *HOST_LABELS,
        Label("source", tuple(SignalSource)),
        Label("result", tuple(SignalResult)),
    )
    run_start_timestamp = gauge(
        "vcpo_run_start_timestamp_seconds",
        "Unix time at which the run was started, resumed or retried last.",
        *HOST_LABELS,
    )
    run_startup_deadline = gauge(
        "vcpo_run_startup_deadline_timestamp_seconds",
        "Unix time at which the run fails unless it has taken a step; absent once it has.",
        *HOST_LABELS,
        appears_with=Feature.STARTING,
    )

    run_certificate_end = gauge(
        "vcpo_run_certificate_end_timestamp_seconds",
        "Unix time at which the first certificate of the run's pods ends.",
        *HOST_LABELS,
        appears_with=Feature.CERTIFICATES,
    )

    def __init__(self, part: PartRegistry | None = None) -> None:
        super().__init__(part or PartRegistry("host", {}))

    def count_from_zero(self, namespace: str, run: str, *, source: SignalSource) -> None:
        """Export the counters of a run at 0, so that `increase()` sees their first event.

        A counter that counts already keeps its value. Process failures are left out, since only
        the local host counts them.
        source: the only one that this host asks for signals.
        """
        for metric in (
            HostMetrics.throttles,
            HostMetrics.throttle_orders,
            HostMetrics.learner_restarts,
        ):
            for values in label_values(metric.labels[len(HOST_LABELS) :]):
                self.made[metric.name].labels(namespace, run, *values)
        for result in SignalResult:
            self.signal_requests.labels(namespace, run, source, result)

    def forget(self, namespace: str, run: str) -> None:
        """Remove the series of a deleted run."""
        for metric in (self.made[each.name] for each in HOST):
            label_sets = [sample.labels for family in metric.collect() for sample in family.samples]
            for labels in label_sets:
                if (labels["namespace"], labels["run"]) == (namespace, run):
                    metric.remove(*labels.values())


HOST = declared_metrics(HostMetrics)
"""Metrics that a host exports for its runs, besides those of every part."""
