"""The three figures of a study: learning curves, final accuracy by lag, signals before a fall."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Final

from vcpo.report.numbers import compact
from vcpo_study.cells.records import CellRecord, StepColumns
from vcpo_study.results.axis import round_ticks
from vcpo_study.results.measures import deepest_fall
from vcpo_study.results.plot import AxisScale, Plot
from vcpo_study.results.sheet import COLORS, colored_curve, draw_sheet
from vcpo_study.results.summary import GridRow
from vcpo_study.study import StudySpec

_STEPS_BEFORE = 100
"""Number of steps before a fall that are shown."""
_LEAST_FALL = 0.2
"""Smaller falls of the accuracy are noise of the evaluation or of training."""
_WINDOW = 10
"""Number of steps in a running median; single steps are too noisy."""
_SMALLEST = 1e-4
"""Lowest level on a logarithmic scale; a gradient of 0 is drawn there."""

_Signal = Callable[[StepColumns], Sequence[float | None]]
_Points = list[tuple[float, float]]


def _quotients(steps: StepColumns) -> list[float]:
    return [
        ratio / on_policy
        for ratio, on_policy in zip(steps.ess_ratio, steps.on_policy_ess_ratio, strict=True)
    ]


_SIGNALS: Final[tuple[tuple[str, _Signal], ...]] = (
    ("ESS ratio / on-policy ratio", _quotients),
    ("Gradient norm", lambda steps: steps.gradient_norm),
    ("KL per token, nats", lambda steps: steps.kl_per_token),
)


def figures(
    study: StudySpec, records: Sequence[CellRecord], rows: Sequence[GridRow]
) -> Mapping[str, str]:
    """Return all figures: SVG by file name."""
    colors = {
        method.name: COLORS[index % len(COLORS)] for index, method in enumerate(study.methods)
    }
    shown = {row.method for row in rows}
    legend = [
        (method.label, colors[method.name]) for method in study.methods if method.name in shown
    ]
    return {
        "accuracy.svg": draw_sheet(
            _accuracy(records, colors),
            legend,
            columns=3,
            about="Held-out accuracy by step, one panel per policy lag, mean over seeds",
        ),
        "final.svg": draw_sheet(
            _final(rows, colors),
            legend,
            columns=2,
            about="Final accuracy by policy lag, mean over seeds with lowest and highest seed",
        ),
        "before_falls.svg": draw_sheet(
            _falls(records, colors),
            legend,
            columns=3,
            about="ESS ratio, gradient norm and divergence in the steps before accuracy falls",
        ),
    }


def _accuracy(records: Sequence[CellRecord], colors: Mapping[str, str]) -> list[Plot]:
    last = max((each.step for record in records for each in record.evaluations), default=1)
    plots = []
    for lag in sorted({record.lag for record in records}):
        evaluations: dict[str, list[_Points]] = defaultdict(list)
        for record in records:
            if record.lag == lag:
                curve = [(float(each.step), each.accuracy) for each in record.evaluations]
                evaluations[record.method].append(curve)
        curves = tuple(
            colored_curve(_by_step(cells, fmean), colors[method])
            for method, cells in evaluations.items()
        )
        plots.append(
            Plot(title=f"k = {lag}", x=_steps_scale(0, last, "step"), y=_unit(), curves=curves)
        )
    return plots


def _final(rows: Sequence[GridRow], colors: Mapping[str, str]) -> list[Plot]:
    lags = sorted({row.lag for row in rows})
    methods = list(dict.fromkeys(row.method for row in rows))
    means, worst = [], []
    for number, method in enumerate(methods):
        # Side by side, so that the bars of one method do not hide those of another.
        aside = (number - (len(methods) - 1) / 2) * 0.09
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.lag)
        spots = [(lags.index(row.lag) + aside, row) for row in own]
        mean = [(at, row.final_accuracy_mean) for at, row in spots]
        lowest = [(at, row.final_accuracy_min) for at, row in spots]
        ranges = tuple((at, row.final_accuracy_min, row.final_accuracy_max) for at, row in spots)
        means.append(colored_curve(mean, colors[method], bars=ranges, has_dots=True))
        worst.append(colored_curve(lowest, colors[method], has_dots=True))
    ticks = tuple((float(place), str(lag)) for place, lag in enumerate(lags))
    x = AxisScale(low=-0.5, high=max(1, len(lags)) - 0.5, ticks=ticks, title="policy lag k")
    return [
        Plot(title="Final accuracy: mean, range of seeds", x=x, y=_unit(), curves=tuple(means)),
        Plot(title="Final accuracy: worst seed", x=x, y=_unit(), curves=tuple(worst)),
    ]


def _falls(records: Sequence[CellRecord], colors: Mapping[str, str]) -> list[Plot]:
    """Plot signals before the deepest fall of each cell that fell: thin lines, bold medians."""
    fallen: dict[str, list[tuple[CellRecord, int]]] = defaultdict(list)
    for record in records:
        depth, step = deepest_fall(record.evaluations)
        if depth >= _LEAST_FALL:
            fallen[record.method].append((record, step))
    plots = []
    for title, value in _SIGNALS:
        by_method = {
            method: [_before(record.steps, step, value) for record, step in cells]
            for method, cells in fallen.items()
        }
        curves = [(method, curve) for method, own in by_method.items() for curve in own]
        levels = [level for _, curve in curves for _, level in curve] or [0.0]
        low = math.floor(min(levels))
        high = max(math.ceil(max(levels)), low + 1)
        ticks = tuple((float(power), compact(10.0**power)) for power in range(low, high + 1))
        thin = [colored_curve(curve, colors[method], is_faint=True) for method, curve in curves]
        medians = [
            colored_curve(_by_step(own, median), colors[method])
            for method, own in by_method.items()
        ]
        plot = Plot(
            title=f"{title} ({len(curves)} cell{'s' if len(curves) != 1 else ''})",
            x=_steps_scale(-_STEPS_BEFORE, 0, "steps before the bottom of the fall"),
            y=AxisScale(low=low, high=high, ticks=ticks),
            curves=(*thin, *medians),
        )
        plots.append(plot)
    return plots


def _before(steps: StepColumns, end: int, value: _Signal) -> _Points:
    """Return the decimal logarithm of a signal as a running median, up to the step `end`."""
    known = [max(each or 0.0, _SMALLEST) for each in value(steps)[:end]]
    first = max(0, end - _STEPS_BEFORE)
    return [
        (at + 1 - end, math.log10(median(known[max(0, at + 1 - _WINDOW) : at + 1])))
        for at in range(first, len(known))
    ]


def _by_step(curves: Iterable[_Points], merge: Callable[[list[float]], float]) -> _Points:
    """Merge the values that several curves have at a step into one."""
    by_step: dict[float, list[float]] = defaultdict(list)
    for at, value in chain.from_iterable(curves):
        by_step[at].append(value)
    return [(at, merge(values)) for at, values in sorted(by_step.items())]


def _steps_scale(low: float, high: float, title: str) -> AxisScale:
    ticks = round_ticks(low, high, about=5, whole=True)
    return AxisScale(
        low=low, high=high, title=title, ticks=tuple((each, compact(each)) for each in ticks)
    )


def _unit() -> AxisScale:
    return AxisScale(low=0.0, high=1.0, ticks=tuple((n / 5, f"{n / 5:.1f}") for n in range(6)))
