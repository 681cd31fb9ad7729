"""The page of all metrics, made of their declarations; `make site` shows it.

What uses a metric is read from the chart's alerts and dashboards.
"""

from typing import Final

from tools.monitoring.catalogue import ALL, BUILD_INFO, PARTS, Metric, MetricUsage, metric_usage

_HEADER: Final = """\
# Metrics

Every process serves its metrics at `/metrics`. `vcpo run` prints where its host serves them, and
`RUN_DIR/processes` has the ports of the others; the chart has annotations and PodMonitors
(`docs/kubernetes.md`).

- **Labels of the scrape** are `namespace` and `pod`. Learner and worker add `run`, the worker also
  `group`. A host has many runs and writes `namespace` and `run` itself, so its scrape needs
  `honorLabels`; the namespace of a local run is empty.
- **A number of the last step** that the step lacks is absent. The learning rate of a skipped step
  is 0.
- **A counter** starts at 0 for every value of its labels that the table names.
- **Quantiles** of `vcpo_policy_lag_steps` never exceed `algorithm.maxPolicyLagSteps`, where its
  last bucket ends. Buckets differ between runs: aggregate them `by (namespace, run, le)`.
- Python's client adds `process_*` (memory, CPU time, open files, start) and `python_info`.

Boards: `off-policy`, `run`, `rollout`, `operator`. Alerts: [runbooks](runbooks.md).
"""
_COLUMNS: Final = "| metric | type | labels | what it says | used by |\n|---|---|---|---|---|\n"
_MOST_ALERTS: Final = 10
"""Metrics of more alerts only say whether a run is active."""
_SECTIONS: Final = {
    "Learner": PARTS["learner"],
    "Rollout worker": PARTS["rollout"],
    "Host (`vcpo run` or the operator), for each run": PARTS["host"],
    "Operator": PARTS["operator"],
    "Every process": (BUILD_INFO,),
}


def rendered_page() -> str:
    """Text of the page."""
    usage = metric_usage(frozenset(metric.name for metric in ALL))
    sections = [
        f"## {title}\n\n{_COLUMNS}{''.join(_row(each, usage[each.name]) for each in metrics)}"
        for title, metrics in _SECTIONS.items()
    ]
    return "\n".join([_HEADER, *sections])


def _row(metric: Metric, usage: MetricUsage) -> str:
    alerts = ", ".join(usage.alerts) if len(usage.alerts) <= _MOST_ALERTS else "nearly every alert"
    boards = ", ".join(board.removeprefix("vcpo-") for board in usage.boards)
    labels = "; ".join(
        f"`{name}` {', '.join(sorted(metric.values[name]))}".rstrip() for name in metric.labels
    )
    used = "; ".join(filter(None, (boards, alerts))) or "the operator, with signals by Prometheus"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {used} |\n"
