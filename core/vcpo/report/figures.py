"""The charts of a report, and how to read each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from vcpo.records.journal import Metrics
from vcpo.records.step_record import CHARTS, StepChart, StepRecord
from vcpo.report.chart import Chart, Horizon, Ink, Mark, Series, SeriesStyle
from vcpo.report.numbers import compact
from vcpo.report.series import points, rolling_mean, smoothing_window
from vcpo.spec import VCPORun

_FEWEST_SMOOTHED = 20
"""Curves of fewer points are not smoothed."""

_Value = Callable[[StepRecord], float | None]


def main_charts(run: VCPORun, metrics: Metrics) -> tuple[Chart, ...]:
    """Return the four charts that show whether a run is healthy: reward, ESS, step size, lag."""
    horizon = _horizon(metrics)
    return (
        _reward(horizon, metrics),
        _ess(horizon, metrics),
        _step_size(horizon, run, metrics),
        _lag(horizon, run, metrics),
    )


def detail_charts(metrics: Metrics) -> tuple[Chart, ...]:
    """Return the smaller charts, which help to find the cause."""
    horizon = _horizon(metrics)
    queue = Chart(
        horizon=horizon,
        y_low=0.0,
        name="queue",
        title="Work in progress",
        unit="trajectories",
        caption="With an empty buffer the learner waits; in a full buffer data becomes old.",
        series=(
            _line("in flight", metrics, lambda step: step.in_flight, Ink.SECOND, SeriesStyle.THIN),
            _line("buffered", metrics, lambda step: step.buffered, style=SeriesStyle.THIN),
        ),
        whole_y=True,
    )
    return (*(_step_chart(horizon, metrics, field, chart) for field, chart in CHARTS), queue)


def _step_chart(horizon: Horizon, metrics: Metrics, field: str, chart: StepChart) -> Chart:
    value: _Value = attrgetter(field)
    return Chart(
        horizon=horizon,
        y_low=0.0,
        name=field,
        title=chart.title,
        unit=chart.unit,
        caption=chart.caption,
        series=_noisy(chart.label, metrics, value)
        if chart.is_noisy
        else (_line(chart.label, metrics, value),),
        whole_y=chart.is_whole,
    )


def _reward(horizon: Horizon, metrics: Metrics) -> Chart:
    evaluations = points([(record.step, record.accuracy) for record in metrics.evaluations])
    held_out = Series(label="held out", points=evaluations, ink=Ink.SECOND, style=SeriesStyle.DOTS)
    return Chart(
        horizon=horizon,
        name="reward",
        title="Reward",
        unit="mean per trajectory",
        caption="Should rise; dots are evaluations on held-out prompts.",
        series=(*_noisy("training", metrics, lambda step: step.reward_mean), held_out),
    )


def _ess(horizon: Horizon, metrics: Metrics) -> Chart:
    reference = _reference("on-policy", metrics, lambda step: step.on_policy_ess_ratio, Ink.THIRD)
    return Chart(
        horizon=horizon,
        name="ess",
        title="ESS ratio",
        unit="effective share of the batch",
        caption="Near the dashed line the data is as good as fresh data; near zero a few "
        "trajectories make up the whole update.",
        series=(*_noisy("ESS ratio", metrics, lambda step: step.ess_ratio), reference),
        y_low=0.0,
    )


def _step_size(horizon: Horizon, run: VCPORun, metrics: Metrics) -> Chart:
    base = compact(run.spec.optimizer.learning_rate)
    return Chart(
        horizon=horizon,
        name="step-size",
        title="Effective learning rate",
        unit=f"share of base {base}",
        caption="Follows the ESS ratio: VCPO takes smaller steps on data that it cannot trust.",
        series=_noisy("scale", metrics, lambda step: step.learning_rate_scale),
        y_low=0.0,
        y_high=1.0,
    )


def _lag(horizon: Horizon, run: VCPORun, metrics: Metrics) -> Chart:
    bound = run.spec.algorithm.max_policy_lag_steps
    return Chart(
        horizon=horizon,
        name="lag",
        title="Policy lag",
        unit="policy versions",
        caption="Age of the trained tokens from sampling to training; the bound is never exceeded.",
        series=(
            _line("max", metrics, lambda step: step.lag_max, Ink.SECOND, SeriesStyle.THIN),
            _line("p50", metrics, lambda step: step.lag_p50, Ink.THIRD, SeriesStyle.THIN),
            _mean(_line("mean", metrics, lambda step: step.lag_mean), "mean, smoothed"),
            _reference(f"bound {bound}", metrics, lambda _: bound, Ink.LIMIT),
        ),
        y_low=0.0,
        whole_y=True,
    )


def _horizon(metrics: Metrics) -> Horizon:
    numbers = [record.step for record in metrics.steps]
    numbers += [record.step for record in metrics.evaluations]
    return Horizon(
        first_step=min(numbers, default=0),
        last_step=max(numbers, default=1),
        marks=tuple(
            Mark(step=record.step, label=f"step {record.step} skipped: {record.skipped}")
            for record in metrics.steps
            if record.skipped is not None
        ),
    )


def _line(
    label: str,
    metrics: Metrics,
    value: _Value,
    ink: Ink = Ink.MAIN,
    style: SeriesStyle = SeriesStyle.LINE,
) -> Series:
    curve = points([(record.step, value(record)) for record in metrics.steps])
    return Series(label=label, points=curve, ink=ink, style=style)


def _noisy(label: str, metrics: Metrics, value: _Value) -> tuple[Series, ...]:
    """Return the values with a smoothed curve in front; few values have none."""
    line = _line(label, metrics, value)
    if len(line.points) < _FEWEST_SMOOTHED:
        return (line,)
    window = smoothing_window(len(line.points))
    return replace(line, label="each step", style=SeriesStyle.RAW), _mean(line, f"mean of {window}")


def _mean(line: Series, label: str) -> Series:
    if len(line.points) < _FEWEST_SMOOTHED:
        return line
    window = smoothing_window(len(line.points))
    return replace(line, label=label, points=rolling_mean(line.points, window=window))


def _reference(label: str, metrics: Metrics, value: _Value, ink: Ink) -> Series:
    """Return a dashed level to compare with; a constant one needs only its two ends."""
    curve = _line(label, metrics, value).points
    if len({point.y for point in curve}) == 1:
        curve = (curve[0], curve[-1])
    return Series(label=label, points=curve, ink=ink, style=SeriesStyle.REFERENCE)
