"""The page of all metrics, made of the catalogue; `make site` shows it.

What uses a metric is read from the chart's alerts and dashboards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tools.monitoring.metric_usage import MetricUsage, metric_usage
from vcpo.metrics import LearnerMetrics, Metric, MetricKind, catalogue
from vcpo.metrics.metric import Label
from vcpo.wire.call_meter import METHODS

_HEADER = """\
# Metrics

Every process serves its metrics at `/metrics`. `vcpo run` prints where its host serves them and
keeps a list of all processes for Prometheus (`examples/prometheus.yml`); the chart has annotations
and PodMonitors (`docs/kubernetes.md`).

- **Labels of the scrape** are `namespace` and `pod`. Learner and worker add `run`, the worker also
  `group`. A host has many runs and writes `namespace` and `run` itself, so its scrape needs
  `honorLabels`; the namespace of a local run is empty.
- **A number of the last step** that the step lacks is absent. A skipped step leaves learning rate,
  scale and gradient norm of the last step that was taken.
- **A counter** starts at 0 for every value of its labels that the table names. One with a label
  whose values are open, such as a status code, starts at its first event, which `increase()` does
  not count.
- **Quantiles** of `vcpo_policy_lag_steps` never exceed what the spec allows: its last bucket ends
  at `algorithm.maxPolicyLagSteps`. The table has the buckets of the default spec. Other runs have
  others: aggregate them `by (namespace, run, le)`.
- **Series of one run**, at most, with 8 rollout groups: {sizes}. Each RPC
  method that learner or worker serves adds {series_of_a_method}.
- Python's client adds `process_*` (memory, CPU time, open files, start) and `python_info`.

Boards: `off-policy`, `run`, `rollout`, `operator`. Alerts: [runbooks](runbooks/README.md).
"""
_COLUMNS = "| metric | type, unit | labels | what it says | used by |\n|---|---|---|---|---|\n"
_MOST_ALERTS = 10
"""Metrics of more alerts only say whether a run is active."""
_SECTIONS: Final = (
    ("Learner", (*catalogue.LEARNER,)),
    ("Rollout worker", (*catalogue.ROLLOUT, *catalogue.ROLLOUT_ENGINE)),
    ("Learner and rollout worker: calls", catalogue.SERVER),
    ("Host (`vcpo run` or the operator), for each run", catalogue.HOST),
    ("Operator", catalogue.OPERATOR),
    ("Every process", (catalogue.BUILD_INFO,)),
)
_OF_SPEC: Final = {
    LearnerMetrics.policy_lag_steps.name: "`algorithm.maxPolicyLagSteps`",
}


def rendered_page() -> str:
    """Text of the page."""
    usage = metric_usage(frozenset(metric.name for metric in catalogue.ALL))
    sections = [_section(title, metrics, usage) for title, metrics in _SECTIONS]
    sizes = ", ".join(
        f"{part} {sum(metric.most_series for metric in metrics)}"
        for part, metrics in (
            ("learner", catalogue.LEARNER),
            ("each worker", (*catalogue.ROLLOUT, *catalogue.ROLLOUT_ENGINE)),
            ("host", catalogue.HOST),
        )
    )
    calls = sum(metric.most_series for metric in catalogue.SERVER) // len(METHODS)
    return "\n".join([_HEADER.format(sizes=sizes, series_of_a_method=calls), *sections])


def _section(title: str, metrics: Sequence[Metric], usage: Mapping[str, MetricUsage]) -> str:
    rows = "".join(_row(metric, usage[metric.name]) for metric in metrics)
    return f"## {title}\n\n{_COLUMNS}{rows}"


def _row(metric: Metric, usage: MetricUsage) -> str:
    meaning = metric.help
    if metric.appears_with is not None:
        meaning += f" Only with {metric.appears_with}."
    alerts = ", ".join(usage.alerts) if len(usage.alerts) <= _MOST_ALERTS else "nearly every alert"
    boards = ", ".join(board.removeprefix("vcpo-") for board in usage.boards)
    used = "; ".join(part for part in (boards, alerts) if part)
    cells = (
        f"`{metric.name}`",
        f"{metric.kind}, {metric.unit}",
        _labels(metric),
        meaning,
        used or f"none: {metric.not_shown}",
    )
    return f"| {' | '.join(cells)} |\n"


def _labels(metric: Metric) -> str:
    described = [_label(label) for label in metric.labels]
    if metric.kind is MetricKind.HISTOGRAM:
        edges = ", ".join(f"{edge:g}" for edge in metric.buckets)
        spec = _OF_SPEC.get(metric.name)
        described.append(f"`le` {edges}" + (f" (by {spec})" if spec else ""))
    return "; ".join(described)


def _label(label: Label) -> str:
    return f"`{label.name}` {', '.join(label.values)}".rstrip()
