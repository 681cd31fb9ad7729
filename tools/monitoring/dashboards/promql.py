"""PromQL of the panels: each series once, however often it was scraped and whoever exported it.

A restarted learner is a new target, and a run's own PodMonitor beside the chart's scrapes a pod
twice. So series of the one learner and of the one active host are aggregated by `max`, and those of
workers first by `instance`, then over the workers. A plain `sum` would count twice.

Metrics are of four scopes. `RUN` selects the chosen runs, `RUNS` all runs of the chosen namespaces,
`OPERATOR` the operator itself. All are variables of the boards.
"""

from typing import Final

RUN: Final = 'cluster=~"$cluster",namespace=~"$namespace",run=~"$run"'
RUNS: Final = 'cluster=~"$cluster",namespace=~"$namespace"'
OPERATOR: Final = 'cluster=~"$cluster"'
_WINDOW: Final = "[$__rate_interval]"
ROLLBACKS: Final = (
    f"max by (namespace, run) (clamp_min(delta(vcpo_learner_rollbacks{{{RUN}}}{_WINDOW}), 0))"
)
"""Rollbacks of the chosen run since the last point."""
RATE_FACTORS: Final = tuple(
    f"vcpo_learning_rate_{name}_ratio" for name in ("schedule", "scale", "backoff")
)
"""What the spec's learning rate is multiplied with."""


def _labels(*labels: str) -> str:
    return ", ".join(("namespace", "run", *labels))


def selector(metric: str, where: str = "", scope: str = RUN) -> str:
    """Return the metric's series of a scope; `where` holds further matchers."""
    return f"{metric}{{{scope}{',' if where else ''}{where}}}"


def value(metric: str, *by: str, where: str = "", scope: str = RUN) -> str:
    """Return a gauge, or the total of a counter, of the learner or of the host."""
    return f"max by ({_labels(*by)}) ({selector(metric, where, scope)})"


def effective_rate(scope: str = RUN) -> str:
    """Return the share of the spec's learning rate that is taken."""
    return " * ".join(value(name, scope=scope) for name in RATE_FACTORS)


def above_zero(metric: str, *by: str) -> str:
    """Return a gauge for a logarithmic axis, on which 0 has no place: from 1e-9 on."""
    return f"clamp_min({value(metric, *by)}, 1e-9)"


def rate(counter: str, *by: str, where: str = "", scope: str = RUN) -> str:
    """Return increases per second of a counter of the learner or of the host."""
    return f"max by ({_labels(*by)}) (rate({selector(counter, where, scope)}{_WINDOW}))"


def increase(counter: str, *by: str, where: str = "", scope: str = RUN) -> str:
    """Return increases since the last point of a counter of the learner or of the host."""
    return f"max by ({_labels(*by)}) (increase({selector(counter, where, scope)}{_WINDOW}))"


def hourly_share(counter: str, by: str, of: str) -> str:
    """Return a counter's increase by a label over another's, as the rules record it.

    An hour holds steps of 15 minutes too. Both jump together, so the ratio is right at any pace.
    """
    part, whole = (f"increase({selector(each)}[1h])" for each in (counter, of))
    return (
        f"max by ({_labels(by)}) ({part})"
        f" / on (namespace, run) group_left () (max by (namespace, run) ({whole}) > 0)"
    )


def quantile(share_below: float, histogram: str, *by: str) -> str:
    """Return a quantile of a histogram of the learner."""
    buckets = rate(f"{histogram}_bucket", *by, "le")
    return f"histogram_quantile({share_below}, {buckets})"


def buckets(histogram: str) -> str:
    """Return the buckets of a histogram of the learner, for a heatmap."""
    return f"max by (le) (increase({selector(f'{histogram}_bucket')}{_WINDOW}))"


def worker_values(operation: str, gauge: str, *by: str) -> str:
    """Return a gauge over the workers; operation: sum, min, avg or max."""
    each = f"max by ({_labels('instance', *by)}) ({selector(gauge)})"
    return f"{operation} by ({_labels(*by)}) ({each})"


def worker_rates(operation: str, counter: str, *by: str, over: tuple[str, ...] = ()) -> str:
    """Return increases per second over the processes of a run; operation: sum, min, avg or max.

    over: labels of the counter over whose values the operation goes as well.
    """
    each = f"max by ({_labels('instance', *by, *over)}) (rate({selector(counter)}{_WINDOW}))"
    return f"{operation} by ({_labels(*by)}) ({each})"


def worker_quantile(share_below: float, histogram: str, *by: str) -> str:
    """Return a quantile of a histogram over all processes of a run that have it."""
    rates = worker_rates("sum", f"{histogram}_bucket", *by, "le")
    return f"histogram_quantile({share_below}, {rates})"


def operator_value(operation: str, gauge: str, *by: str) -> str:
    """Return a gauge of the operator over its replicas; operation: sum, min or max."""
    return f"{operation} by ({', '.join(by)}) ({selector(gauge, scope=OPERATOR)})"


def operator_rate(counter: str, *by: str, over: tuple[str, ...] = ()) -> str:
    """Return increases per second of the operator's counter, summed over its replicas.

    over: labels of the counter whose values are summed as well.
    """
    each = f"rate({selector(counter, scope=OPERATOR)}{_WINDOW})"
    return f"sum by ({', '.join(by)}) (max by ({', '.join((*by, *over, 'instance'))}) ({each}))"


def operator_quantile(share_below: float, histogram: str) -> str:
    """Return a quantile of a histogram of the operator."""
    return f"histogram_quantile({share_below}, {operator_rate(f'{histogram}_bucket', 'le')})"


def of_part(part: str, expression: str, scope: str = RUN) -> str:
    """Return those series of an expression whose target is a part: learner, rollout, operator."""
    targets = selector("vcpo_build_info", f'part="{part}"', scope)
    return f"{expression} and on (instance) {targets}"
