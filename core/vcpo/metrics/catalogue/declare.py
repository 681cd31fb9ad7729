"""Short forms of `Metric` for the catalogue's tables."""

from __future__ import annotations

from typing import Final

from vcpo.metrics.metric import Feature, Label, Metric, MetricKind
from vcpo.records.step_chart import Unit

_UNITS: Final = {
    "timestamp_seconds": Unit.UNIX_SECONDS,
    "seconds": Unit.SECONDS,
    "bytes": Unit.BYTES,
    "ratio": Unit.RATIO,
    "nats": Unit.NATS,
    "tokens": Unit.TOKENS,
    "steps": Unit.STEPS,
    "step": Unit.STEPS,
    "versions": Unit.VERSIONS,
    "version": Unit.VERSIONS,
    "trajectories": Unit.TRAJECTORIES,
}


def unit_in_name(name: str) -> Unit:
    """Return the unit that a metric's name ends in; a count where it ends in none."""
    stem = name.removesuffix("_total")
    return next((unit for word, unit in _UNITS.items() if stem.endswith(f"_{word}")), Unit.COUNT)


def counter(
    name: str,
    help_text: str,
    *labels: Label,
    appears_with: Feature | None = None,
    not_shown: str = "",
) -> Metric:
    """Declare a counter."""
    return Metric(
        name=name,
        kind=MetricKind.COUNTER,
        help=help_text,
        unit=unit_in_name(name),
        labels=labels,
        appears_with=appears_with,
        not_shown=not_shown,
    )


def gauge(
    name: str,
    help_text: str,
    *labels: Label,
    unit: Unit | None = None,
    appears_with: Feature | None = None,
    not_shown: str = "",
) -> Metric:
    """Declare a gauge that is exported from the start, or with labels from its first value."""
    return Metric(
        name=name,
        kind=MetricKind.GAUGE,
        help=help_text,
        unit=unit or unit_in_name(name),
        labels=labels,
        appears_with=appears_with,
        not_shown=not_shown,
    )


def measure(
    name: str,
    help_text: str,
    *,
    unit: Unit | None = None,
    appears_with: Feature | None = None,
    not_shown: str = "",
) -> Metric:
    """Declare a gauge of a measured number: it is exported once it was set."""
    return Metric(
        name=name,
        kind=MetricKind.GAUGE,
        help=help_text,
        unit=unit or unit_in_name(name),
        absent_until_set=True,
        appears_with=appears_with,
        not_shown=not_shown,
    )


def histogram(
    name: str,
    help_text: str,
    buckets: tuple[float, ...],
    *labels: Label,
    unit: Unit | None = None,
    appears_with: Feature | None = None,
) -> Metric:
    """Declare a histogram by the upper bounds of its buckets, without +Inf."""
    return Metric(
        name=name,
        kind=MetricKind.HISTOGRAM,
        help=help_text,
        unit=unit or unit_in_name(name),
        labels=labels,
        buckets=buckets,
        appears_with=appears_with,
    )
