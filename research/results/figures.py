"""The figures of a study: heat maps of the plane, and what staleness does at synchronous rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from research.cells.records import LOG_WEIGHT_QUANTILES, CellRecord
from research.results.plane import PlanePoint
from research.results.summary import StudySummary
from research.study import StudySpec
from vcpo.report.numbers import compact

COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#8c6d00",
    "#56b4e9",
    "#444444",
    "#e69f00",
    "#882255",
    "#332288",
    "#44aa99",
    "#999933",
)
"""Most color-blind readers can tell these apart: the first eight by Okabe and Ito
(https://jfly.uni-koeln.de/color/), the others by Tol (https://sronpersonalpages.nl/~pault/)."""

_FRAME: Final[Mapping[str, Any]] = {"fill": False, "edgecolor": "#d55e00", "linewidth": 1.8}
_INSET: Final = 0.03
"""Distance of a frame from the sides of its cell, whose length is 1."""
_PANEL_INCHES: Final = (3.2, 2.3)
_LEGEND_INCHES: Final = 0.25
"""Height of one row of the legend."""
_ASIDE: Final = 0.09
"""Distance of two methods at one lag, so that the bars of one do not hide those of another."""
_DARK_SHARE: Final = 0.55
"""Above this share of the full accuracy, white letters are easier to read."""
_OUTER: Final = (LOG_WEIGHT_QUANTILES.index(0.01), LOG_WEIGHT_QUANTILES.index(0.99))
_LEAST_LOG_WEIGHT: Final = -20.0
"""Lower log weights are drawn at the edge: their trajectories count for nothing."""
_STYLE: Final[Any] = {
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "font.size": 8,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "vcpo",  # identifiers are not random
}

_Spot = tuple[int, float, float, float]
"""Lag, number, and the ends of its bar."""
_Points = list[tuple[float, float]]


def save_figures(
    study: StudySpec, summary: StudySummary, claims: Sequence[CellRecord], folder: Path
) -> None:
    """Write all figures into a folder; equal numbers make equal files.

    claims: records at the synchronous rates.
    """
    with mpl.rc_context(_STYLE):
        for name, figure in figures(study, summary, claims).items():
            figure.savefig(folder / name, metadata={"Date": None, "Creator": None})


def figures(
    study: StudySpec, summary: StudySummary, claims: Sequence[CellRecord]
) -> Mapping[str, Figure]:
    """Return all figures by file name.

    claims: records at the synchronous rates.
    """
    names = [method.name for method in study.methods]
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    shown = {row.method for row in summary.claims}
    legend = [
        Line2D([], [], color=colors[each.name], label=each.label)
        for each in study.methods
        if each.name in shown
    ]
    with mpl.rc_context(_STYLE):
        return {
            "heat_maps.svg": _heat_maps(study, summary),
            "by_lag.svg": _by_lag(summary, colors, legend),
            "accuracy.svg": _accuracy(claims, colors, legend),
            "weights.svg": _weights(study, claims, colors, legend),
        }


def _sheet(
    panels: int, legend: Sequence[Line2D | Rectangle], columns: int = 3
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of equal panels in rows, with a legend below them."""
    rows = -(-panels // columns)
    per_row = columns if columns < 3 else columns + 1
    below = -(-len(legend) // per_row) * _LEGEND_INCHES
    width, height = _PANEL_INCHES
    size = columns * width, max(1, rows) * height + below
    figure = Figure(figsize=size, layout="constrained")
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=per_row, frameon=False)
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]


def _heat_maps(study: StudySpec, summary: StudySummary) -> Figure:
    points: dict[str, list[PlanePoint]] = defaultdict(list)
    for point in summary.plane:
        points[point.method].append(point)
    chosen = {each.method: each.learning_rate for each in summary.tuned if each.chosen}
    full = max((point.final_accuracy_mean for point in summary.plane), default=0.0) or 1.0
    framed = Rectangle((0, 0), 1, 1, label="reaches the synchronous target", **_FRAME)
    methods = [method for method in study.methods if method.name in points]
    figure, panels = _sheet(len(methods), [framed])
    for method, axes in zip(methods, panels, strict=True):
        axes.set(title=method.label, xlabel="policy lag k", ylabel="learning rate")
        _heat_map(axes, study, points[method.name], full, summary.target)
        for rate, label in zip(sorted(study.learning_rates), axes.get_yticklabels(), strict=True):
            label.set_fontweight("bold" if rate == chosen.get(method.name) else "normal")
    return figure


def _heat_map(
    axes: Axes, study: StudySpec, points: Iterable[PlanePoint], full: float, target: float | None
) -> None:
    """Draw the accuracy of each rate and lag on a ground that is darker if it is higher."""
    rates, lags = sorted(study.learning_rates), sorted(study.lags)
    grid = np.full((len(rates), len(lags)), np.nan)
    for point in points:
        row, column = rates.index(point.learning_rate), lags.index(point.lag)
        value = grid[row, column] = point.final_accuracy_mean
        color = "white" if value > _DARK_SHARE * full else "#333333"
        middle = column + 0.5, row + 0.5
        axes.text(*middle, f"{value:.2f}", color=color, ha="center", va="center")
        if target is not None and value >= target:
            corner, side = (column + _INSET, row + _INSET), 1.0 - 2 * _INSET
            axes.add_patch(Rectangle(corner, side, side, zorder=2, **_FRAME))
    axes.grid(visible=False)
    axes.pcolormesh(grid, cmap="Blues", vmin=0.0, vmax=full)
    axes.set_xticks(np.arange(len(lags)) + 0.5, labels=[str(lag) for lag in lags])
    axes.set_yticks(np.arange(len(rates)) + 0.5, labels=[compact(rate) for rate in rates])


def _by_lag(summary: StudySummary, colors: Mapping[str, str], legend: Sequence[Line2D]) -> Figure:
    collapses: dict[str, list[_Spot]] = defaultdict(list)
    finals: dict[str, list[_Spot]] = defaultdict(list)
    for row in summary.claims:
        found = row.collapse
        collapses[row.method].append((row.lag, found.share, found.low, found.high))
        ends = row.final_accuracy_min, row.final_accuracy_max
        finals[row.method].append((row.lag, row.final_accuracy_mean, *ends))
    widths: dict[str, list[_Spot]] = defaultdict(list)
    for safe in summary.safe:
        decades = safe.seed_decades or (safe.decades,)
        widths[safe.method].append((safe.lag, safe.decades, min(decades), max(decades)))
    figure, (collapse, final, width) = _sheet(3, legend)
    _lag_plot(collapse, "Probability of collapse, 95 % interval", collapses, colors)
    _lag_plot(final, "Final accuracy: mean, range of seeds", finals, colors)
    _lag_plot(width, "Safe rates, decades", widths, colors)
    for axes in (collapse, final):
        axes.set_ylim(0.0, 1.0)
    width.set_ylim(bottom=0.0)
    return figure


def _lag_plot(
    axes: Axes, title: str, spots: Mapping[str, Sequence[_Spot]], colors: Mapping[str, str]
) -> None:
    lags = sorted({spot[0] for own in spots.values() for spot in own})
    for number, (method, own) in enumerate(spots.items()):
        aside = (number - (len(spots) - 1) / 2) * _ASIDE
        at, values, lows, highs = zip(*sorted(own), strict=True)
        places = [lags.index(lag) + aside for lag in at]
        axes.plot(places, values, color=colors[method], marker="o", markersize=3)
        axes.vlines(places, lows, highs, color=colors[method], linewidth=1.0)
    axes.set(title=title, xlabel="policy lag k")
    axes.set_xticks(range(len(lags)), labels=[str(lag) for lag in lags])


def _accuracy(
    records: Sequence[CellRecord], colors: Mapping[str, str], legend: Sequence[Line2D]
) -> Figure:
    lags = sorted({record.lag for record in records})
    figure, panels = _sheet(len(lags), legend)
    for lag, axes in zip(lags, panels, strict=True):
        for method, own in _by_method(records, lag).items():
            evaluations = [
                [(float(each.step), each.accuracy) for each in record.evaluations] for record in own
            ]
            _curve(axes, _mean_by_step(evaluations), colors[method])
        axes.set(title=f"k = {lag}", xlabel="step", ylim=(0.0, 1.0))
    return figure


def _weights(
    study: StudySpec,
    records: Sequence[CellRecord],
    colors: Mapping[str, str],
    legend: Sequence[Line2D],
) -> Figure:
    """Plot the outer quantiles of the log weights of each lag above 0, and below them the ESS."""
    width, trajectories = study.run.evaluation.every_steps, study.run.batch.trajectories
    lags = sorted({record.lag for record in records} - {0})
    figure, panels = _sheet(2 * len(lags), legend, columns=max(1, len(lags)))
    for lag, spread, size in zip(lags, panels, panels[len(lags) :], strict=False):
        for method, own in _by_method(records, lag).items():
            for quantile in _OUTER:
                columns = (
                    [None if each is None else each[quantile] for each in record.steps.log_weights]
                    for record in own
                )
                _curve(spread, _mean_of_windows(columns, width), colors[method])
            shares = (
                [None if each is None else each / trajectories for each in record.steps.ess]
                for record in own
            )
            _curve(size, _mean_of_windows(shares, width), colors[method])
        spread.set(title=f"k = {lag}: 1 % and 99 % of log weights", xlabel="step")
        spread.set_ylim(bottom=max(_LEAST_LOG_WEIGHT, spread.get_ylim()[0]))
        size.set(title=f"k = {lag}: ESS over trajectories", xlabel="step", ylim=(0.0, 1.0))
    return figure


def _curve(axes: Axes, points: _Points, color: str) -> None:
    axes.plot([at for at, _ in points], [value for _, value in points], color=color)


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
