"""What observed runs show of metrics, panels and alerts, as plain values, and what it must be."""

from dataclasses import dataclass
from typing import Any

from tests.fixtures.observation.exposure import compare, exposed_names
from tests.fixtures.observation.panels import Panel, all_panels, panels_without_data
from tests.fixtures.observation.prometheus_server import PrometheusServer
from tests.observation import collapse
from tests.observation.local_runs import COLLAPSE, SCRAPE_INTERVAL_MS, Observation, ObservedRun
from tools.monitoring.catalogue import BUILD_INFO, PARTS
from vcpo.api import load_run
from vcpo.control.limits import ChangeKind

LOCAL_PARTS = ("learner", "rollout", "host")
ABSENT = {
    "vcpo_learner_device_memory_bytes",
    "vcpo_rollout_device_memory_bytes",
    "vcpo_run_certificate_end_timestamp_seconds",
}
"""Metrics that runs without GPU and certificates lack."""
OF_THE_OPERATOR = {metric.name for metric in PARTS["operator"]} | {"operator", "Ready"}
"""Words of queries that only a run under the operator answers."""
_STEP_S = SCRAPE_INTERVAL_MS / 1000
"""Step of queries, so that none of them passes over what a single scrape saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiredAlert:
    """One alert over the time of a run; its first and last time are Unix times."""

    name: str
    first_s: float
    last_s: float


def local_findings(observation: Observation) -> dict[str, Any]:
    """What the local runs show."""
    start_s, end_s = observation.runs[0].started_s, observation.runs[-1].ended_s
    exposures = [
        compare(
            exposed_names(observation.server, f'{{part="{part}"}}', start_s, end_s),
            (BUILD_INFO, *PARTS[part]),
            ABSENT,
        )
        for part in LOCAL_PARTS
    ]
    return {
        **alarm(observation),
        "panels": len(all_panels()),
        "panels_without_data": sorted(empty_panels(observation)),
        "undeclared": sorted({name for each in exposures for name in each.undeclared}),
        "missing": sorted({name for each in exposures for name in each.missing}),
    }


def missed_bars(found: dict[str, Any]) -> list[str]:
    """What the findings should be and are not."""
    to_throttle = found["critical_to_throttle_steps"]
    bars = {
        "no alert may fire on a healthy run": not found["alerts_on_healthy"],
        "what is due must fire": set(found["due"]) <= set(found["fired"]),
        "no alert may outlive the run": set(found["fired"]) == set(found["resolved"]),
        "Prometheus and journal must show one effective rate": found["effective_rate_agrees"],
        "the throttle must follow within 2 steps": to_throttle is not None and to_throttle <= 2,
        "at most 3 steps may use older data": found["steps_trained_after_throttle_on_older"] <= 3,
        "event, condition and metric must say why": found["throttle_reason_visible"],
        "the run must recover": found["recovered"],
        "at most 48 panels": found["panels"] <= 48,
        "every panel must have data": not found["panels_without_data"],
        "every sample must be declared": not found["undeclared"],
        "every declared metric must have a sample": not found["missing"],
    }
    return [bar for bar, holds in bars.items() if not holds]


def empty_panels(observation: Observation) -> frozenset[Panel]:
    """Panels that no local run answers, though it has their metrics."""
    answers = [
        panels_without_data(
            observation.server,
            namespace="",
            run=run.name,
            start_s=run.started_s,
            end_s=run.ended_s,
            absent=ABSENT | OF_THE_OPERATOR,
        )
        for run in observation.runs
    ]
    return frozenset.intersection(*answers)


def alarm(observation: Observation) -> dict[str, Any]:
    """What fired on each run, and what followed from the warning on the one that collapsed."""
    server, healthy, collapsed = observation.server, observation.healthy, observation.collapsed
    fired = fired_alerts(server, collapsed.started_s, collapsed.ended_s)
    steps, evaluations = collapsed.metrics.steps, collapsed.metrics.evaluations
    bound = load_run(COLLAPSE).spec.algorithm.max_policy_lag_steps
    return {
        "alerts_on_healthy": [
            each.name for each in fired_alerts(server, healthy.started_s, healthy.ended_s)
        ],
        "fired": [each.name for each in fired],
        "due": sorted(collapse.due_alerts(steps, evaluations)),
        "fired_after_s": {
            each.name: round(each.first_s - collapsed.started_s, 1) for each in fired
        },
        "resolved": [each.name for each in fired if each.last_s < collapsed.ended_s - 1.0],
        "effective_rate_agrees": effective_rate_agrees(server, collapsed),
        "throttle_reason_visible": throttle_reason_is_visible(server, collapsed),
        "critical_step": collapse.first_critical_step(steps),
        "throttled_step": collapse.first_tightened_step(steps, bound),
        "critical_to_throttle_steps": collapse.critical_to_throttle_steps(steps, bound),
        "steps_trained_after_throttle_on_older": collapse.steps_on_older_data(steps, bound),
        "recovered": collapse.has_recovered(steps, evaluations),
        "accuracies": [round(each.accuracy, 3) for each in evaluations],
    }


def fired_alerts(server: PrometheusServer, start_s: float, end_s: float) -> list[FiredAlert]:
    """Alerts that fired in a time, each once, in order of their first firing."""
    found = server.query_range(
        'max by (alertname) (ALERTS{alertstate="firing"})', start_s, end_s, step_s=0.25
    )
    fired = [
        FiredAlert(
            name=series.labels["alertname"],
            first_s=series.points[0][0],
            last_s=series.points[-1][0],
        )
        for series in found
    ]
    return sorted(fired, key=lambda each: (each.first_s, each.name))


def effective_rate_agrees(server: PrometheusServer, run: ObservedRun) -> bool:
    """Whether the last scraped rate is that of the run's last step with an update, and its factors.

    A scrape may miss the last step, so any of the last steps will do.
    """
    names = ("rate", "rate_schedule_ratio", "rate_scale_ratio", "rate_backoff_ratio")
    scraped = [
        server.samples(f'vcpo_learning_{name}{{run="{run.name}"}}', run.started_s, run.ended_s)
        for name in names
    ]
    shown = tuple(points[-1][1] for points in scraped)
    rates = [each.effective_rate for each in run.metrics.steps[-10:]]
    return shown in [
        (rate.rate, rate.schedule, rate.scale, rate.backoff) for rate in rates if rate is not None
    ]


def throttle_reason_is_visible(server: PrometheusServer, run: ObservedRun) -> bool:
    """Whether event, condition and metric all say that the early warning tightened the limit.

    The condition has the level of each poll. A fast machine is critical for less time than passes
    between two polls, and is warned for longer. The event is the learner's own.
    """
    events = [each.message for each in run.events if each.kind == ChangeKind.THROTTLED]
    of_run = f'run="{run.name}"'
    levels = 'reason=~"Warn|Critical|Dead"'
    condition = f'vcpo_run_condition_reason{{condition="Stable",{levels},{of_run}}}'
    metric = f'vcpo_run_throttles_total{{direction="tighten",{of_run}}} > 0'
    return any("early warning" in each for each in events) and all(
        server.query_range(expression, run.started_s, run.ended_s, step_s=_STEP_S)
        for expression in (condition, metric)
    )
