"""Every metric of the project, as its part declares it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        ends = (
            {"_bucket", "_count"} if self.name.endswith("_nats") else {"_bucket", "_count", "_sum"}
        )
        return frozenset(self.name + end for end in ends)


def _instruments(part: object) -> Iterator[Any]:
    for value in vars(part).values():
        if isinstance(value, MetricWrapperBase):
            yield value
        elif isinstance(value, dict):
            yield from value.values()


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
    return tuple(map(_metric, _instruments(part)))


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
