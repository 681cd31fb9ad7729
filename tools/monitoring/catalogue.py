"""Every metric of the project, as its part declares it, and where the chart uses it."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from prometheus_client.metrics import MetricWrapperBase

from tools.monitoring.rules import rules
from vcpo.metrics import HostMetrics, LearnerMetrics, OperatorMetrics, RolloutMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The declaration of one metric."""

    name: str
    """Full name in a query; of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    help: str
    labels: tuple[str, ...]
    """Labels besides the constant ones of the part."""
    values: Mapping[str, frozenset[str]]
    """Values of the labels that are exported from the start; empty for a label of other values."""

    @property
    def sample_names(self) -> frozenset[str]:
        """Names that its samples have; a histogram of values below 0 has no sum."""
        if self.kind != "histogram":
            return frozenset({self.name})
        ends = {"_bucket", "_count", *(() if self.name.endswith("_nats") else ("_sum",))}
        return frozenset(self.name + end for end in ends)


def _metric(instrument: Any) -> Metric:
    (family,) = instrument.describe()
    samples = [each for one in instrument.collect() for each in one.samples]
    labels = tuple(instrument._labelnames)
    return Metric(
        name=family.name + ("_total" if family.type == "counter" else ""),
        kind=family.type,
        help=family.documentation,
        labels=labels,
        values={name: frozenset(each.labels[name] for each in samples) for name in labels},
    )


def _metrics(part: object) -> tuple[Metric, ...]:
    held = [each.values() if isinstance(each, dict) else [each] for each in vars(part).values()]
    return tuple(_metric(each) for each in chain(*held) if isinstance(each, MetricWrapperBase))


_HOST: Final = _metrics(HostMetrics())
BUILD_INFO: Final = Metric(
    name="vcpo_build_info",
    kind="gauge",
    help="Always 1; the labels name the part and its version.",
    labels=("part", "version"),
    values={"part": frozenset(), "version": frozenset()},
)
PARTS: Final[Mapping[str, tuple[Metric, ...]]] = {
    "learner": _metrics(LearnerMetrics(run="run")),
    "rollout": _metrics(RolloutMetrics(run="run", group="main")),
    "host": _HOST,
    "operator": _metrics(OperatorMetrics())[len(_HOST) :],
}
"""Metrics by the part that exports them; the operator is a host too."""
CONSTANT_LABELS: Final = {"learner": ("run",), "rollout": ("run", "group")}
"""Labels on all metrics of a part."""
ALL: Final = (BUILD_INFO, *(metric for metrics in PARTS.values() for metric in metrics))


_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OF_HISTOGRAM: Final = ("_bucket", "_count", "_sum")
DASHBOARDS: Final = Path(__file__).parents[2] / "charts" / "vcpo" / "files" / "dashboards"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricUsage:
    """What uses one metric, directly or through recorded series."""

    alerts: tuple[str, ...] = ()
    """Names of alerts, in alphabetical order."""
    boards: tuple[str, ...] = ()
    """Identifiers of dashboards, in alphabetical order."""


def metric_usage(names: frozenset[str]) -> Mapping[str, MetricUsage]:
    """Return the use of each of these metrics; the name of a histogram is without its suffix."""
    recorded = {rule.name: rule.expression for rule in rules() if not rule.is_alert}
    alerts, boards = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for rule in rules():
        for used in _series_of(rule.expression, recorded) if rule.is_alert else ():
            alerts[used].add(rule.name)
    for path in DASHBOARDS.glob("*.json"):
        for expression in _expressions(json.loads(path.read_text(encoding="utf-8"))):
            for used in _series_of(expression, recorded):
                boards[used].add(path.stem)
    return {
        name: MetricUsage(alerts=tuple(sorted(alerts[name])), boards=tuple(sorted(boards[name])))
        for name in names
    }


def _series_of(expression: str, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield the metrics that an expression reads; those of recorded series in their place."""
    for name in names_in(expression):
        if name in recorded:
            yield from _series_of(recorded[name], recorded)
        else:
            yield name


def _expressions(node: Any) -> Iterator[str]:
    """Yield the queries of a dashboard: panels, annotations and variables."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in {"expr", "query"} and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for each in node:
            yield from _expressions(each)


def names_in(expression: str) -> frozenset[str]:
    """Return every word of an expression, among them its series; of `x_bucket` also `x`."""
    words = set(_NAME.findall(expression))
    families = {word.removesuffix(end) for word in words for end in _OF_HISTOGRAM}
    return frozenset(words | families)
