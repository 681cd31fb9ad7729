"""The plane of learning rate and lag: final accuracies, and how wide a method's safe rates are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from research.cells.records import CellRecord
from research.results.measures import final_accuracy
from research.results.safe_range import SafeRange, safe_range


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanePoint:
    """One method at one lag and one learning rate, over the plane's seeds."""

    method: str
    lag: int
    learning_rate: float
    num_seeds: int
    final_accuracy_mean: float
    final_accuracy_std: float
    """Sample standard deviation over seeds; 0 for one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRates:
    """The learning rates at which a method still reaches a target at one lag."""

    method: str
    lag: int
    decades: float
    """Width of the range of mean accuracies over seeds; 0 when no rate reaches the target."""
    range: SafeRange | None
    """None when no rate reaches the target."""
    seed_decades: tuple[float, ...]
    """The same width for each seed alone, from the lowest to the highest."""
    own_decades: float
    """Width for the method's own target, its share of the best accuracy that it has at lag 0."""
    taken: tuple[float, float] | None
    """Lowest and highest of the rates at which steps were really taken, over the requested rates
    that reach the target; None when none does."""


_Curve = Mapping[float, float]
"""Accuracy by learning rate."""


def plane_points(records: Iterable[CellRecord]) -> list[PlanePoint]:
    """Return the points, in the order in which methods, lags and rates first occur."""
    points = []
    for (method, lag, rate), finals in _finals(records).items():
        accuracies = list(finals.values())
        points.append(
            PlanePoint(
                method=method,
                lag=lag,
                learning_rate=rate,
                num_seeds=len(accuracies),
                final_accuracy_mean=fmean(accuracies),
                final_accuracy_std=stdev(accuracies) if len(accuracies) > 1 else 0.0,
            )
        )
    return points


def safe_rates(
    records: Iterable[CellRecord],
    rates: Sequence[float],
    target: float,
    *,
    own_targets: Mapping[str, float],
    taken_rate: Callable[[CellRecord], float],
) -> list[SafeRates]:
    """Return the safe rates of each method and lag of which every rate was run.

    rates: the learning rates of the plane. target: accuracy that a safe rate reaches. own_targets:
    the same by method, from its own accuracy without lag. taken_rate: that of a cell's steps.
    """
    records = list(records)
    curves: dict[tuple[str, int], dict[float, Mapping[int, float]]] = defaultdict(dict)
    for (method, lag, rate), finals in _finals(records).items():
        curves[method, lag][rate] = finals
    taken: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for record in records:
        taken[record.method, record.lag, record.learning_rate].append(taken_rate(record))
    found = []
    for (method, lag), by_rate in curves.items():
        if set(by_rate) != set(rates):
            continue
        means = {rate: fmean(finals.values()) for rate, finals in by_rate.items()}
        seeds = set.intersection(*(set(finals) for finals in by_rate.values()))
        own = ({rate: by_rate[rate][seed] for rate in by_rate} for seed in seeds)
        safe = _range(means, target)
        steps = [fmean(taken[method, lag, rate]) for rate in means if means[rate] >= target]
        found.append(
            SafeRates(
                method=method,
                lag=lag,
                decades=_decades(safe),
                range=safe,
                seed_decades=tuple(sorted(_decades(_range(curve, target)) for curve in own)),
                own_decades=_decades(_range(means, own_targets[method])),
                taken=(min(steps), max(steps)) if steps else None,
            )
        )
    return found


def _finals(
    records: Iterable[CellRecord],
) -> Mapping[tuple[str, int, float], Mapping[int, float]]:
    """Return final accuracies by method, lag and rate, then by seed."""
    found: dict[tuple[str, int, float], dict[int, float]] = defaultdict(dict)
    for record in records:
        place = record.method, record.lag, record.learning_rate
        found[place][record.seed] = final_accuracy(record.evaluations)
    return found


def _range(curve: _Curve, target: float) -> SafeRange | None:
    return safe_range(sorted(curve.items()), target)


def _decades(safe: SafeRange | None) -> float:
    return 0.0 if safe is None else safe.decades
