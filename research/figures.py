"""The figures of a study: heat maps of the plane, and what staleness does at synchronous rates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from research.results import Tuning
from research.study import StudySpec
from vcpo.report.numbers import compact

COLORS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#444444", "#e69f00"),
    *("#882255", "#332288", "#44aa99", "#999933"),
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


def save_figures(
    study: StudySpec,
    plane: pd.DataFrame,
    lags: pd.DataFrame,
    safe: pd.DataFrame,
    tuned: Tuning,
    prefix: Path,
) -> None:
    """Write `<prefix>-heat_maps.svg` and `<prefix>-by_lag.svg`; equal numbers make equal files.

    plane, lags, safe, tuned: as `results` returns them.
    """
    with mpl.rc_context(_STYLE):
        for name, figure in (
            ("heat_maps", _heat_maps(study, plane, tuned)),
            ("by_lag", _by_lag(study, lags, safe)),
        ):
            path = prefix.with_name(f"{prefix.name}-{name}.svg")
            figure.savefig(path, metadata={"Date": None, "Creator": None})


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


def _heat_maps(study: StudySpec, plane: pd.DataFrame, tuned: Tuning) -> Figure:
    full = float(np.nanmax(plane.to_numpy())) or 1.0
    framed = Rectangle((0, 0), 1, 1, label="reaches the synchronous target", **_FRAME)
    methods = [each for each in study.methods if each.name in plane.index.levels[0]]
    figure, panels = _sheet(len(methods), [framed])
    for method, axes in zip(methods, panels, strict=True):
        axes.set(title=method.label, xlabel="policy lag k", ylabel="learning rate")
        _heat_map(axes, plane.loc[method.name], full, tuned.target)
        for rate, label in zip(sorted(plane.columns), axes.get_yticklabels(), strict=True):
            label.set_fontweight("bold" if rate == tuned.rates.get(method.name) else "normal")
    return figure


def _heat_map(axes: Axes, points: pd.DataFrame, full: float, target: float) -> None:
    """Draw the accuracy of each rate and lag on a ground that is darker if it is higher."""
    grid = points.sort_index().sort_index(axis="columns").T
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        if np.isnan(value):
            continue
        color = "white" if value > _DARK_SHARE * full else "#333333"
        axes.text(column + 0.5, row + 0.5, f"{value:.2f}", color=color, ha="center", va="center")
        if value >= target:
            corner, side = (column + _INSET, row + _INSET), 1.0 - 2 * _INSET
            axes.add_patch(Rectangle(corner, side, side, zorder=2, **_FRAME))
    axes.grid(visible=False)
    axes.pcolormesh(grid.to_numpy(), cmap="Blues", vmin=0.0, vmax=full)
    axes.set_xticks(np.arange(grid.shape[1]) + 0.5, labels=[str(lag) for lag in grid.columns])
    axes.set_yticks(np.arange(grid.shape[0]) + 0.5, labels=[compact(rate) for rate in grid.index])


def _by_lag(study: StudySpec, lags: pd.DataFrame, safe: pd.DataFrame) -> Figure:
    shown = [each for each in study.methods if each.name in set(lags.method)]
    colors = {each.name: COLORS[index % len(COLORS)] for index, each in enumerate(shown)}
    legend = [Line2D([], [], color=colors[each.name], label=each.label) for each in shown]
    lags = lags.assign(share=lags.collapses / lags.cells)
    figure, (collapse, final, width) = _sheet(3, legend)
    _lag_plot(collapse, lags, ("share", "collapse_low", "collapse_high"), colors)
    _lag_plot(final, lags, ("final", "lowest", "highest"), colors)
    _lag_plot(width, safe, ("decades", "decades", "decades"), colors)
    collapse.set(title="Probability of collapse, 95 % interval", ylim=(0.0, 1.0))
    final.set(title="Final accuracy: mean, range of seeds", ylim=(0.0, 1.0))
    width.set(title="Safe rates, decades")
    width.set_ylim(bottom=0.0)
    return figure


def _lag_plot(
    axes: Axes, rows: pd.DataFrame, columns: Sequence[str], colors: Mapping[str, str]
) -> None:
    """Draw a line for each method; columns: the number, and the ends of its bar."""
    lags = sorted(set(rows.lag)) if len(rows) else []
    for number, (method, color) in enumerate(colors.items()):
        own = rows[rows.method == method].sort_values("lag") if len(rows) else rows
        if own.empty:
            continue
        aside = (number - (len(colors) - 1) / 2) * _ASIDE
        places = [lags.index(lag) + aside for lag in own.lag]
        value, low, high = (own[name] for name in columns)
        axes.plot(places, value, color=color, marker="o", markersize=3)
        axes.vlines(places, low, high, color=color, linewidth=1.0)
    axes.set(xlabel="policy lag k")
    axes.set_xticks(range(len(lags)), labels=[str(lag) for lag in lags])
