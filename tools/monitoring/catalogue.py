"""Every metric of the project, as its part declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from prometheus_client.metrics import MetricWrapperBase

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
