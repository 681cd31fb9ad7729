"""The figures of a study: heat maps of the plane, and what staleness does at synchronous rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Final

from vcpo.report.numbers import compact
from vcpo_study.cells.records import LOG_WEIGHT_QUANTILES, CellRecord
from vcpo_study.results.drawing.axis import round_ticks, widen
from vcpo_study.results.drawing.plot import AxisScale, Curve, Plot, draw_plot
from vcpo_study.results.drawing.sheet import COLORS, FRAME_COLOR, PANEL, colored_curve, draw_sheet
from vcpo_study.results.heat_map import HeatMap, draw_heat_map
from vcpo_study.results.summary import StudySummary
from vcpo_study.study import StudySpec

_ASIDE: Final = 0.09
"""Distance of two methods at one lag, so that the bars of one do not hide those of another."""
_OUTER: Final = (LOG_WEIGHT_QUANTILES.index(0.01), LOG_WEIGHT_QUANTILES.index(0.99))
_LEAST_LOG_WEIGHT: Final = -20.0
"""Lower log weights are drawn at the edge: their trajectories count for nothing."""

_Spot = tuple[int, float, float, float]
"""Lag, number, and the ends of its bar."""
_Points = list[tuple[float, float]]


def figures(
    study: StudySpec, summary: StudySummary, claims: Sequence[CellRecord]
) -> Mapping[str, str]:
    """Return all figures: SVG by file name.

    claims: records at the synchronous rates.
    """
    colors = {
        method.name: COLORS[index % len(COLORS)] for index, method in enumerate(study.methods)
    }
    shown = {row.method for row in summary.claims}
    legend = [(each.label, colors[each.name]) for each in study.methods if each.name in shown]
    return {
        "heat_maps.svg": draw_sheet(
            [draw_heat_map(each, PANEL) for each in _heat_maps(study, summary)],
            [("reaches the synchronous target", FRAME_COLOR)],
            columns=3,
            about="Final accuracy by learning rate and policy lag, one panel per method",
        ),
        "by_lag.svg": draw_sheet(
            [draw_plot(each, PANEL) for each in _by_lag(summary, colors)],
            legend,
            columns=3,
            about="Collapses, final accuracy and width of the safe rates by policy lag",
        ),
        "accuracy.svg": draw_sheet(
            [draw_plot(each, PANEL) for each in _accuracy(claims, colors)],
            legend,
            columns=3,
            about="Held-out accuracy by step, one panel per policy lag, mean over seeds",
        ),
        "weights.svg": draw_sheet(
            [draw_plot(each, PANEL) for each in _weights(study, claims, colors)],
            legend,
            columns=max(1, len({each.lag for each in claims if each.lag > 0})),
            about="Log importance weights and effective sample size by step, by policy lag",
        ),
    }


def _heat_maps(study: StudySpec, summary: StudySummary) -> list[HeatMap]:
    rates, lags = sorted(study.learning_rates, reverse=True), sorted(study.lags)
    full = max((point.final_accuracy_mean for point in summary.plane), default=0.0) or 1.0
    chosen = {each.method: rates.index(each.learning_rate) for each in summary.tuned if each.chosen}
    maps = []
    for method in study.methods:
        values = {
            (rates.index(point.learning_rate), lags.index(point.lag)): point.final_accuracy_mean
            for point in summary.plane
            if point.method == method.name
        }
        target = summary.target
        safe = (place for place in values if target is not None and values[place] >= target)
        maps.append(
            HeatMap(
                title=method.label,
                x_title="policy lag k",
                y_title="rate",
                rows=tuple(map(compact, rates)),
                columns=tuple(map(str, lags)),
                values=values,
                full=full,
                framed=frozenset(safe),
                chosen_row=chosen.get(method.name),
            )
        )
    return [each for each in maps if each.values]


def _by_lag(summary: StudySummary, colors: Mapping[str, str]) -> list[Plot]:
    collapses: dict[str, list[_Spot]] = defaultdict(list)
    finals: dict[str, list[_Spot]] = defaultdict(list)
    for row in summary.claims:
        found = row.collapse
        collapses[row.method].append((row.lag, found.share, found.low, found.high))
        ends = row.final_accuracy_min, row.final_accuracy_max
        finals[row.method].append((row.lag, row.final_accuracy_mean, *ends))
    widths: dict[str, list[_Spot]] = defaultdict(list)
    for safe in summary.safe:
        ends = (
            min(safe.seed_decades, default=safe.decades),
            max(safe.seed_decades, default=safe.decades),
        )
        widths[safe.method].append((safe.lag, safe.decades, *ends))
    widest = max((spot[3] for spots in widths.values() for spot in spots), default=0.0) or 1.0
    decades = AxisScale(low=0.0, high=widest, ticks=_ticks(0.0, widest))
    return [
        _lag_plot("Probability of collapse, 95 % interval", collapses, _unit(), colors),
        _lag_plot("Final accuracy: mean, range of seeds", finals, _unit(), colors),
        _lag_plot("Safe rates, decades", widths, decades, colors),
    ]


def _lag_plot(
    title: str, spots: Mapping[str, Sequence[_Spot]], y: AxisScale, colors: Mapping[str, str]
) -> Plot:
    lags = sorted({spot[0] for own in spots.values() for spot in own})
    curves = []
    for number, (method, own) in enumerate(spots.items()):
        aside = (number - (len(spots) - 1) / 2) * _ASIDE
        placed = [(lags.index(lag) + aside, *numbers) for lag, *numbers in sorted(own)]
        line = [(at, value) for at, value, _, _ in placed]
        bars = tuple((at, low, high) for at, _, low, high in placed)
        curves.append(colored_curve(line, colors[method], bars=bars, has_dots=True))
    ticks = tuple((float(place), str(lag)) for place, lag in enumerate(lags))
    x = AxisScale(low=-0.5, high=max(1, len(lags)) - 0.5, ticks=ticks, title="policy lag k")
    return Plot(title=title, x=x, y=y, curves=tuple(curves))


def _accuracy(records: Sequence[CellRecord], colors: Mapping[str, str]) -> list[Plot]:
    x = _steps_scale(records)
    return [
        Plot(
            title=f"k = {lag}",
            x=x,
            y=_unit(),
            curves=tuple(
                colored_curve(
                    _mean_by_step(
                        [(float(each.step), each.accuracy) for each in record.evaluations]
                        for record in own
                    ),
                    colors[method],
                )
                for method, own in _by_method(records, lag).items()
            ),
        )
        for lag in sorted({record.lag for record in records})
    ]


def _weights(
    study: StudySpec, records: Sequence[CellRecord], colors: Mapping[str, str]
) -> list[Plot]:
    """Plot the outer quantiles of the log weights of each lag above 0, and below them the ESS."""
    width, trajectories = study.run.evaluation.every_steps, study.run.batch.trajectories
    x = _steps_scale(records)
    spreads, sizes = [], []
    for lag in sorted({record.lag for record in records} - {0}):
        outer: list[Curve] = []
        ess: list[Curve] = []
        for method, own in _by_method(records, lag).items():
            for quantile in _OUTER:
                columns = (
                    [None if each is None else each[quantile] for each in record.steps.log_weights]
                    for record in own
                )
                outer.append(colored_curve(_mean_of_windows(columns, width), colors[method]))
            shares = (
                [None if each is None else each / trajectories for each in record.steps.ess]
                for record in own
            )
            ess.append(colored_curve(_mean_of_windows(shares, width), colors[method]))
        y = _log_weight_scale([at for curve in outer for _, at in curve.points if at is not None])
        title = f"k = {lag}: 1 % and 99 % of log weights"
        spreads.append(Plot(title=title, x=x, y=y, curves=tuple(outer)))
        title = f"k = {lag}: ESS over trajectories"
        sizes.append(Plot(title=title, x=x, y=_unit(), curves=tuple(ess)))
    return [*spreads, *sizes]


def _by_method(records: Iterable[CellRecord], lag: int) -> Mapping[str, Sequence[CellRecord]]:
    found: dict[str, list[CellRecord]] = defaultdict(list)
    for record in records:
        if record.lag == lag:
            found[record.method].append(record)
    return found


def _mean_by_step(curves: Iterable[_Points]) -> _Points:
    """Return the mean of the values that curves have at a step."""
    by_step: dict[float, list[float]] = defaultdict(list)
    for at, value in chain.from_iterable(curves):
        by_step[at].append(value)
    return [(at, fmean(values)) for at, values in sorted(by_step.items())]


def _mean_of_windows(columns: Iterable[Sequence[float | None]], width: int) -> _Points:
    """Return means over windows of steps and over cells, each in the middle of its window."""
    return _mean_by_step(
        [
            ((index // width + 0.5) * width, value)
            for index, value in enumerate(column)
            if value is not None
        ]
        for column in columns
    )


def _steps_scale(records: Iterable[CellRecord]) -> AxisScale:
    last = max((each.step for record in records for each in record.evaluations), default=1)
    ticks = round_ticks(0, last, about=5, whole=True)
    labels = tuple((each, compact(each)) for each in ticks)
    return AxisScale(low=0, high=last, title="step", ticks=labels)


def _log_weight_scale(values: Sequence[float]) -> AxisScale:
    lowest = max(_LEAST_LOG_WEIGHT, min(values, default=0.0))
    low, high = widen(lowest, max(lowest, *values, 0.0))
    return AxisScale(low=low, high=high, ticks=_ticks(low, high))


def _ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    return tuple((each, compact(each)) for each in round_ticks(low, high, about=5))


def _unit() -> AxisScale:
    return AxisScale(low=0.0, high=1.0, ticks=tuple((n / 5, f"{n / 5:.1f}") for n in range(6)))
