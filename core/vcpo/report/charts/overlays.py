"""The charts of a comparison: one curve for each run, in the run's color."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from vcpo.records.step_record import CHARTS
from vcpo.report.charts.chart import CATEGORIES, Chart, Curve, CurveStyle, Ink, Table
from vcpo.report.charts.figures import (
    EVALUATIONS,
    STEPS,
    WARNING_BANDS,
    StepValue,
    chart_name,
    learning_rate_scale,
    recorded_value,
    tables_of,
)
from vcpo.report.charts.series import column, rolling_mean, smoothing_window
from vcpo.report.recorded_run import RecordedRun


def inks_of(runs: Sequence[RecordedRun]) -> tuple[Ink, ...]:
    """Return the color of each run; a ninth run has the first one's."""
    return tuple(ink for ink, _ in zip(cycle(CATEGORIES), runs, strict=False))


def overlay_tables(runs: Sequence[RecordedRun]) -> tuple[Table, ...]:
    """Return the rows of all runs, each table named after its place among the runs."""
    return tuple(
        replace(table, name=_table_name(place, table.name))
        for place, recorded in enumerate(runs)
        for table in tables_of(recorded)
    )


def main_overlays(runs: Sequence[RecordedRun]) -> tuple[Chart, ...]:
    """Return the charts that show which run is healthier."""
    return (
        Chart(
            name="reward",
            title="Training reward",
            unit="mean per trajectory, smoothed",
            caption="Mean over a twentieth of the run; the runs may have different lengths.",
            curves=_smoothed(runs, lambda step: step.reward_mean),
        ),
        _accuracy(runs),
        Chart(
            name="relative-ess",
            title="Relative ESS",
            unit="ESS ratio over on-policy ratio, smoothed",
            caption="1 is as good as fresh data; the same measure for responses of any length.",
            curves=_smoothed(runs, lambda step: step.relative_ess_ratio),
            low=0.0,
        ),
        Chart(
            name="step-size",
            title="Learning-rate scale",
            unit="share of each run's base, smoothed",
            caption="The base rates are among the differences of the specs, if they differ.",
            curves=_smoothed(runs, learning_rate_scale),
            low=0.0,
            high=1.0,
        ),
        Chart(
            name="lag",
            title="Policy lag",
            unit="policy versions, mean, smoothed",
            caption="Age of the trained tokens.",
            curves=_smoothed(runs, lambda step: step.lag_mean),
            low=0.0,
        ),
        Chart(
            name="warning",
            title="Early warning",
            unit="severity of the worst sign",
            caption="From 1/3 the batches are far off policy; from 2/3 runs have collapsed.",
            curves=_curves(runs, lambda step: step.warning_score),
            bands=WARNING_BANDS,
            low=0.0,
            high=1.0,
        ),
    )


def detail_overlays(runs: Sequence[RecordedRun]) -> tuple[Chart, ...]:
    """Return a small chart for each number that the step record declares a chart of."""
    charts = []
    for field, chart in CHARTS:
        curves = _curves(runs, recorded_value(field, chart))
        is_smoothed = chart.is_noisy and not chart.is_log
        shown = Chart(
            name=chart_name(field, chart),
            title=chart.title,
            unit=f"{chart.unit}, smoothed" if is_smoothed else chart.unit,
            caption=chart.caption,
            curves=tuple(map(_with_rolling_mean, curves)) if is_smoothed else curves,
            low=None if chart.is_signed or chart.is_log else 0.0,
            is_whole=chart.is_whole,
            is_log=chart.is_log,
        )
        charts.append(shown)
    return tuple(charts)


def _smoothed(runs: Sequence[RecordedRun], value: StepValue) -> tuple[Curve, ...]:
    return tuple(map(_with_rolling_mean, _curves(runs, value)))


def _curves(runs: Sequence[RecordedRun], value: StepValue) -> tuple[Curve, ...]:
    """Return a curve for each run; `value` takes the number of a step."""
    inks = inks_of(runs)
    return tuple(
        Curve(
            label=recorded.name,
            table=_table_name(place, STEPS),
            values=column(map(value, recorded.metrics.steps)),
            ink=inks[place],
        )
        for place, recorded in enumerate(runs)
    )


def _with_rolling_mean(curve: Curve) -> Curve:
    window = smoothing_window(len(curve.values))
    return replace(curve, values=rolling_mean(curve.values, window=window), is_smooth=True)


def _accuracy(runs: Sequence[RecordedRun]) -> Chart:
    inks = inks_of(runs)
    return Chart(
        name="accuracy",
        title="Accuracy",
        unit="held-out prompts",
        caption="Evaluations; a run without any has no curve.",
        curves=tuple(
            Curve(
                label=recorded.name,
                table=_table_name(place, EVALUATIONS),
                values=column(each.accuracy for each in recorded.metrics.evaluations),
                ink=inks[place],
                style=CurveStyle.DOTS,
            )
            for place, recorded in enumerate(runs)
        ),
    )


def _table_name(place: int, name: str) -> str:
    return f"{place}-{name}"
