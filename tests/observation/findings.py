"""What observed runs show of metrics, panels and alerts, as plain values for one JSON object."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tests.fixtures.observation.exposure import Exposure, compare, exposed_names, most_series
from tests.fixtures.observation.panels import PanelAnswers, answer_panels
from tests.fixtures.observation.prometheus_server import PrometheusServer
from tests.observation import collapse
from tests.observation.alerts import FiredAlert, early_firings_s, fired_alerts, longest_above_s
from tests.observation.local_runs import (
    COLLAPSE,
    SCALE,
    SCRAPE_INTERVAL_MS,
    Observation,
    ObservedRun,
)
from vcpo.api import load_run
from vcpo.control.limits import ChangeKind
from vcpo.metrics import catalogue
from vcpo.metrics.metric import Feature, Metric

LOCAL_PARTS: dict[str, tuple[Metric, ...]] = {
    "learner": (catalogue.BUILD_INFO, *catalogue.SERVER, *catalogue.LEARNER),
    "rollout": (
        catalogue.BUILD_INFO,
        *catalogue.ROLLOUT,
        *catalogue.ROLLOUT_ENGINE,
    ),
    "host": (catalogue.BUILD_INFO, *catalogue.HOST),
}
"""What each part of a local run declares."""

LOCAL_FEATURES = (
    Feature.VLLM,
    Feature.EVALUATION,
    Feature.CHECKPOINT,
    Feature.LOCAL,
    Feature.STARTING,
    Feature.CALLED,
    Feature.GRADIENT_NORMS,
)
"""What the runs together have, of what a metric may need to appear."""

WARNING_ALERT = "VCPOCollapseWarning"
CRITICAL_ALERT = "VCPOCollapseImminent"
CRITICAL_ALERT_S = 60 * SCALE
"""Time for which a run must be critical before that alert fires, in the rules' faster time."""
CRITICAL_RATIO = 2 / 3
"""Early warning at and above which a run is critical."""
WARNING_WINDOW_S = 300 * SCALE
"""Time for which a run must show no warning before the warning's alert ends, likewise."""

_STEP_S = SCRAPE_INTERVAL_MS / 1000
"""Step of queries, so that none of them passes over what a single scrape saw."""


def exposures(observation: Observation) -> dict[str, Exposure]:
    """Compare what each part of the local runs exposed with its declarations."""
    start_s, end_s = observation.runs[0].started_s, observation.runs[-1].ended_s
    return {
        part: compare(
            exposed_names(observation.server, f'{{part="{part}"}}', start_s, end_s),
            declared,
            LOCAL_FEATURES,
        )
        for part, declared in LOCAL_PARTS.items()
    }


def series_per_run(observation: Observation) -> dict[str, int]:
    """The largest number of series of one process of each part."""
    start_s, end_s = observation.runs[0].started_s, observation.runs[-1].ended_s
    return {
        part: most_series(observation.server, f'{{part="{part}"}}', start_s, end_s)
        for part in LOCAL_PARTS
    }


def local_panels(observation: Observation) -> PanelAnswers:
    """Ask every panel's query over the time of each local run."""
    answers = [
        answer_panels(
            observation.server,
            namespace="",
            run=run.name,
            start_s=run.started_s,
            end_s=run.ended_s,
            features=LOCAL_FEATURES,
        )
        for run in observation.runs
    ]
    return functools.reduce(PanelAnswers.merge, answers)


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
        "fired_after_s": {
            each.name: round(each.first_s - collapsed.started_s, 1) for each in fired
        },
        **critical_alert(server, collapsed),
        "resolved": [each.name for each in fired if each.last_s < collapsed.ended_s - 1.0],
        "warning_outlasts_s": warning_outlasts_s(server, collapsed, fired),
        "throttle_reason_visible": throttle_reason_is_visible(server, collapsed),
        "critical_step": collapse.first_critical_step(steps),
        "throttled_step": collapse.first_tightened_step(steps, bound),
        "critical_to_throttle_steps": collapse.critical_to_throttle_steps(steps, bound),
        "steps_trained_after_throttle_on_older": collapse.steps_on_older_data(steps, bound),
        "recovered": collapse.has_recovered(steps, evaluations),
        "accuracies": [round(each.accuracy, 3) for each in evaluations],
    }


def warning_outlasts_s(
    server: PrometheusServer, run: ObservedRun, fired: Sequence[FiredAlert]
) -> float | None:
    """Time from the last scraped warning of a run to the last firing of its alert, in seconds.

    How long a run shows warnings is its own affair; when the alert ends afterwards is the rule's.
    None if the alert never fired.
    """
    last_fired_s = next((each.last_s for each in fired if each.name == WARNING_ALERT), None)
    if last_fired_s is None:
        return None
    expression = f'vcpo_collapse_warning_ratio{{run="{run.name}"}} >= 1 / 3'
    found = server.query_range(expression, run.started_s, run.ended_s, step_s=_STEP_S)
    return round(last_fired_s - max(each.points[-1][0] for each in found), 2)


def critical_alert(server: PrometheusServer, run: ObservedRun) -> dict[str, Any]:
    """For how long the scraped run was critical, and when the alert fired without such a time.

    What was scraped decides, and not the journal: on a busy machine Prometheus misses scrapes.
    """
    start_s, end_s, of_run = run.started_s, run.ended_s, f'run="{run.name}"'
    warnings = server.samples(f"vcpo_collapse_warning_ratio{{{of_run}}}", start_s, end_s)
    firing = f'ALERTS{{alertname="{CRITICAL_ALERT}",alertstate="firing",{of_run}}}'
    firings = server.samples(firing, start_s, end_s)
    return {
        "critical_s": round(longest_above_s(warnings, CRITICAL_RATIO), 2),
        "critical_fired_early": early_firings_s(
            [time_s for time_s, _ in firings],
            warnings,
            threshold=CRITICAL_RATIO,
            window_s=CRITICAL_ALERT_S,
        ),
    }


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
