"""The three figures of a study: learning curves, final accuracy by lag, the way into a fall."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median

from vcpo.report.axis import round_ticks
from vcpo.report.numbers import compact
from vcpo_study.cells.records import CellRecord, StepRow
from vcpo_study.results.measures import deepest_fall
from vcpo_study.results.summary import GridRow
from vcpo_study.results.svg import COLORS, Curve, Panel, Scale, draw
from vcpo_study.study import StudySpec

_STEPS_BEFORE = 100
"""Steps before a fall that are shown."""
_LEAST_FALL = 0.2
"""A smaller fall of the accuracy is noise of the evaluation or of training."""
_WINDOW = 10
"""Steps whose median is drawn; one step says little."""
_SMALLEST = 1e-4
"""Lowest level on a logarithmic scale; a gradient of 0 stands there."""

_Signal = Callable[[StepRow], float | None]


def figures(
    study: StudySpec, records: Sequence[CellRecord], rows: Sequence[GridRow]
) -> Mapping[str, str]:
    """All figures, SVG by file name."""
    colors = {
        method.name: COLORS[index % len(COLORS)] for index, method in enumerate(study.methods)
    }
    shown = {record.method for record in records}
    legend = [
        (method.label, colors[method.name]) for method in study.methods if method.name in shown
    ]
    falls = _falls(records, colors)
    return {
        "accuracy.svg": draw(
            _accuracy(records, colors),
            legend,
            columns=3,
            about="Held-out accuracy by step, one panel per policy lag, mean over seeds",
        ),
        "final.svg": draw(
            _final(rows, colors),
            legend,
            columns=2,
            about="Final accuracy by policy lag, mean over seeds with lowest and highest seed",
        ),
        "before_falls.svg": draw(
            falls,
            legend,
            columns=3,
            about="ESS ratio, gradient norm and divergence in the steps before accuracy falls",
        ),
    }


def _accuracy(records: Sequence[CellRecord], colors: Mapping[str, str]) -> list[Panel]:
    last = max((each.step for record in records for each in record.evaluations), default=1)
    panels = []
    for lag in sorted({record.lag for record in records}):
        groups = _by_method(record for record in records if record.lag == lag)
        curves = tuple(
            Curve(points=_mean_curve(group), color=colors[method])
            for method, group in groups.items()
        )
        panels.append(
            Panel(title=f"k = {lag}", x=_steps_scale(0, last, "step"), y=_unit(), curves=curves)
        )
    return panels


def _mean_curve(group: Sequence[CellRecord]) -> tuple[tuple[float, float], ...]:
    by_step: dict[int, list[float]] = defaultdict(list)
    for record in group:
        for each in record.evaluations:
            by_step[each.step].append(each.accuracy)
    return tuple((step, fmean(values)) for step, values in sorted(by_step.items()))


def _final(rows: Sequence[GridRow], colors: Mapping[str, str]) -> list[Panel]:
    lags = sorted({row.lag for row in rows})
    methods = list(dict.fromkeys(row.method for row in rows))
    means, worst = [], []
    for number, method in enumerate(methods):
        # Side by side, or the bars of one method would hide those of another.
        aside = (number - (len(methods) - 1) / 2) * 0.09
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.lag)
        spots = [(lags.index(row.lag) + aside, row) for row in own]
        means.append(_mean_and_range(spots, colors[method]))
        lowest = tuple((at, row.final_accuracy_min) for at, row in spots)
        worst.append(Curve(points=lowest, color=colors[method], dots=True))
    ticks = tuple((float(place), str(lag)) for place, lag in enumerate(lags))
    x = Scale(low=-0.5, high=max(1, len(lags)) - 0.5, ticks=ticks, title="policy lag k")
    return [
        Panel(title="Final accuracy: mean, range of seeds", x=x, y=_unit(), curves=tuple(means)),
        Panel(title="Final accuracy: worst seed", x=x, y=_unit(), curves=tuple(worst)),
    ]


def _mean_and_range(spots: Sequence[tuple[float, GridRow]], color: str) -> Curve:
    return Curve(
        points=tuple((at, row.final_accuracy_mean) for at, row in spots),
        color=color,
        ranges=tuple((at, row.final_accuracy_min, row.final_accuracy_max) for at, row in spots),
        dots=True,
    )


def _falls(records: Sequence[CellRecord], colors: Mapping[str, str]) -> list[Panel]:
    """Signals against steps before the bottom of the deepest fall: cells thin, medians bold."""
    fallen = [
        (record, step)
        for record in records
        for depth, step in [deepest_fall(record.evaluations)]
        if depth >= _LEAST_FALL
    ]
    signals: list[tuple[str, _Signal]] = [
        ("ESS ratio / on-policy ratio", lambda row: row.ess_ratio / row.on_policy_ess_ratio),
        ("Gradient norm", lambda row: row.gradient_norm),
        ("KL per token, nats", lambda row: row.kl_per_token),
    ]
    return [_signal_panel(title, _approaches(fallen, value, colors)) for title, value in signals]


def _approaches(
    fallen: Sequence[tuple[CellRecord, int]], value: _Signal, colors: Mapping[str, str]
) -> dict[str, list[Curve]]:
    """One curve for each cell that fell, by method."""
    curves: dict[str, list[Curve]] = defaultdict(list)
    for record, step in fallen:
        points = _before(record.steps, step, value)
        thin = Curve(points=points, color=colors[record.method], width=0.8, opacity=0.35)
        curves[record.method].append(thin)
    return curves


def _median_curve(cells: Sequence[Curve]) -> Curve:
    by_step: dict[float, list[float]] = defaultdict(list)
    for at, level in chain.from_iterable(cell.points for cell in cells):
        by_step[at].append(level)
    points = tuple((at, median(levels)) for at, levels in sorted(by_step.items()))
    return Curve(points=points, color=cells[0].color)


def _before(steps: Sequence[StepRow], end: int, value: _Signal) -> tuple[tuple[float, float], ...]:
    """Decimal logarithm of a signal, as a running median."""
    values = [value(row) for row in steps[:end]]
    known = [max(each or 0.0, _SMALLEST) for each in values]
    first = max(0, end - _STEPS_BEFORE)
    return tuple(
        (at + 1 - end, math.log10(median(known[max(0, at + 1 - _WINDOW) : at + 1])))
        for at in range(first, len(known))
    )


def _signal_panel(title: str, cells: Mapping[str, Sequence[Curve]]) -> Panel:
    thin = list(chain.from_iterable(cells.values()))
    levels = [level for curve in thin for _, level in curve.points] or [0.0]
    low = math.floor(min(levels))
    high = max(math.ceil(max(levels)), low + 1)
    ticks = tuple((float(power), compact(10.0**power)) for power in range(low, high + 1))
    return Panel(
        title=f"{title} ({len(thin)} cell{'s' if len(thin) != 1 else ''})",
        x=_steps_scale(-_STEPS_BEFORE, 0, "steps before the bottom of the fall"),
        y=Scale(low=low, high=high, ticks=ticks),
        curves=(*thin, *map(_median_curve, cells.values())),
    )


def _by_method(records: Iterable[CellRecord]) -> dict[str, list[CellRecord]]:
    groups: dict[str, list[CellRecord]] = defaultdict(list)
    for record in records:
        groups[record.method].append(record)
    return groups


def _steps_scale(low: float, high: float, title: str) -> Scale:
    ticks = round_ticks(low, high, about=5, whole=True)
    return Scale(
        low=low, high=high, title=title, ticks=tuple((each, compact(each)) for each in ticks)
    )


def _unit() -> Scale:
    return Scale(low=0.0, high=1.0, ticks=tuple((n / 5, f"{n / 5:.1f}") for n in range(6)))
