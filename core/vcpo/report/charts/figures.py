"""The charts of a run's report, and how to read each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from vcpo.algo.health.early_warning import CRITICAL_SCORE, WARN_SCORE
from vcpo.algo.health.lag_breakdown import LAG_BUCKETS
from vcpo.api.optimizer import Optimizer, Schedule
from vcpo.records.step_record import StepRecord
from vcpo.report.charts.chart import (
    CATEGORIES,
    Band,
    Chart,
    Curve,
    CurveStyle,
    Heatmap,
    Ink,
    Mark,
    Table,
)
from vcpo.report.charts.series import column, rolling_mean, smoothing_window
from vcpo.report.charts.step_chart import CHARTS, ChartTopic, StepChart, chart_value
from vcpo.report.numbers import compact
from vcpo.report.recorded_run import RecordedRun

STEPS = "steps"
"""Name of the table of a run's steps."""
EVALUATIONS = "evaluations"

WARNING_BANDS = (
    Band(low=WARN_SCORE, high=CRITICAL_SCORE, level="warn"),
    Band(low=CRITICAL_SCORE, high=1.0, level="critical"),
)

_FEWEST_SMOOTHED = 20
"""Curves of fewer points are not smoothed."""

StepValue = Callable[[StepRecord], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Charts that answer one question."""

    title: str
    charts: tuple[Chart, ...]


def tables_of(recorded: RecordedRun) -> tuple[Table, ...]:
    """Return the rows that the charts of a run refer to."""
    clock = recorded.clock
    return tuple(
        Table(
            name=name,
            steps=tuple(record.step for record in records),
            times_s=tuple(clock.elapsed_s(record.time_unix_s) for record in records),
        )
        for name, records in (
            (STEPS, recorded.metrics.steps),
            (EVALUATIONS, recorded.metrics.evaluations),
        )
    )


def marks_of(recorded: RecordedRun) -> tuple[Mark, ...]:
    """Return a mark for each skipped step."""
    return tuple(
        Mark(
            step=record.step,
            time_s=recorded.clock.elapsed_s(record.time_unix_s),
            label=f"skipped: {record.skipped}",
        )
        for record in recorded.metrics.steps
        if record.skipped is not None
    )


def main_charts(recorded: RecordedRun) -> tuple[Chart, ...]:
    """Return the charts that show whether a run is healthy."""
    steps = recorded.metrics.steps
    return (
        _reward(recorded),
        _warning(recorded),
        _ess(steps),
        _step_size(recorded),
        _lag(recorded),
        _ess_by_lag(steps),
    )


def sections(recorded: RecordedRun) -> tuple[Section, ...]:
    """Return the smaller charts, which help to find the cause, by topic."""
    steps = recorded.metrics.steps
    more = {
        ChartTopic.OFF_POLICY: (_mismatch(steps), _queue(steps), _drops(steps)),
        ChartTopic.UPDATE: (_reward_parts(steps),),
        ChartTopic.SPEED: (
            _response_length(steps),
            _throughput_per_worker(steps),
            _seconds(steps),
        ),
    }
    return tuple(
        Section(
            title=topic.value,
            charts=(
                *(step_chart(recorded, name, each) for name, each in CHARTS if each.topic is topic),
                *more.get(topic, ()),
            ),
        )
        for topic in ChartTopic
    )


def rate_share(step: StepRecord) -> float | None:
    """Return the effective learning rate over the spec's rate; None of a skipped step."""
    return None if step.effective_rate is None else step.effective_rate.share


def ess_ratio(step: StepRecord) -> float | None:
    """Return the ESS ratio of a step whose importance weights all have a value."""
    return step.ess_ratio if step.has_weights else None


def step_chart(recorded: RecordedRun, field: str, chart: StepChart) -> Chart:
    """Return the small chart of one number of the step record."""
    steps = recorded.metrics.steps
    line = _line(chart.label, steps, lambda step: chart_value(step, field, chart))
    return Chart(
        name=(chart.entry or field).replace("_", "-"),
        title=chart.title,
        unit=chart.unit,
        caption=chart.caption,
        curves=_with_trend(line) if chart.is_noisy else (line,),
        low=None if chart.is_signed or chart.is_log else 0.0,
        is_whole=chart.is_whole,
        is_log=chart.is_log,
    )


def _reward(recorded: RecordedRun) -> Chart:
    held_out = Curve(
        label="held out",
        table=EVALUATIONS,
        values=column(record.accuracy for record in recorded.metrics.evaluations),
        ink=Ink.SECOND,
        style=CurveStyle.DOTS,
    )
    training = _line("training", recorded.metrics.steps, lambda step: step.reward_mean)
    return Chart(
        name="reward",
        title="Reward",
        unit="mean per trajectory",
        caption="Should rise; dots are evaluations on held-out prompts.",
        curves=(*_with_trend(training), held_out),
    )


def _warning(recorded: RecordedRun) -> Chart:
    return Chart(
        name="warning",
        title="Early warning",
        unit="severity of the worst sign",
        caption="From 1/3 the batches are far off policy; from 2/3 runs have collapsed; 1 is dead.",
        curves=(_line("score", recorded.metrics.steps, lambda step: step.warning_score),),
        bands=WARNING_BANDS,
        low=0.0,
        high=1.0,
    )


def _ess(steps: Sequence[StepRecord]) -> Chart:
    on_policy = _line(
        "on-policy",
        steps,
        lambda step: step.on_policy_ess_ratio,
        Ink.SOFT,
        CurveStyle.REFERENCE,
    )
    return Chart(
        name="ess",
        title="ESS ratio",
        unit="effective share of the batch",
        caption="Near the dashed line the data is as good as fresh data; near zero a few "
        "trajectories make up the whole update.",
        curves=(*_with_trend(_line("ESS ratio", steps, ess_ratio)), on_policy),
        low=0.0,
    )


def _step_size(recorded: RecordedRun) -> Chart:
    steps = recorded.metrics.steps
    thin = CurveStyle.THIN

    def factor(name: str) -> StepValue:
        return lambda step: getattr(step, name) if step.skipped is None else None

    return Chart(
        name="step-size",
        title="Effective learning rate",
        unit="share of optimizer.learningRate",
        caption="The rate that was taken is schedule x ESS x backoff of it. VCPO takes smaller "
        "steps on data that it cannot trust; critical warnings and rollbacks halve the backoff. "
        + _base_rate_course(recorded.run.spec.optimizer),
        curves=(
            *_with_trend(_line("effective", steps, rate_share)),
            _line("schedule", steps, factor("learning_rate_schedule"), Ink.SOFT, thin),
            _line("ESS", steps, factor("learning_rate_scale"), Ink.SECOND, thin),
            _line("backoff", steps, factor("learning_rate_backoff"), Ink.THIRD, thin),
        ),
        low=0.0,
        high=1.0,
    )


def _base_rate_course(settings: Optimizer) -> str:
    """Return a sentence about the base rate: its size, its warm-up and its schedule."""
    rate, course = compact(settings.learning_rate), ""
    if settings.warmup_steps:
        course = f" after {settings.warmup_steps} updates"
    if settings.schedule is not Schedule.CONSTANT:
        final = compact(settings.learning_rate * settings.final_learning_rate_ratio)
        course += f", then falls to {final} ({settings.schedule})"
    return f"The base rate is {rate}{course}."


def _lag(recorded: RecordedRun) -> Chart:
    allowed = recorded.run.spec.algorithm.max_policy_lag_steps
    steps = recorded.metrics.steps
    mean = _line("mean", steps, lambda step: step.lag_mean)
    thin, dashed = CurveStyle.THIN, CurveStyle.REFERENCE
    return Chart(
        name="lag",
        title="Policy lag",
        unit="policy versions",
        caption="Age of the trained tokens. The throttle lowers the lag limit; no token is older "
        "than `maxPolicyLagSteps`.",
        curves=(
            _line("max", steps, lambda step: step.lag_max, Ink.SECOND, thin),
            _line("p50", steps, lambda step: step.lag_p50, Ink.SOFT, thin),
            _smooth(mean, "mean, smoothed"),
            _line("lag limit", steps, lambda step: step.lag_limit_steps, Ink.THIRD),
            _line(f"most {allowed}", steps, lambda _: allowed, Ink.LIMIT, dashed),
        ),
        low=0.0,
        is_whole=True,
    )


def _ess_by_lag(steps: Sequence[StepRecord]) -> Chart:
    seen = {int(lag) for step in steps for lag in step.ess_by_lag}
    lags = [lag for lag in LAG_BUCKETS if lag in seen]
    cells = tuple(column(step.ess_by_lag.get(str(lag)) for step in steps) for lag in lags)
    return Chart(
        name="ess-by-lag",
        title="ESS ratio by lag",
        unit="policy versions",
        caption="A cell is the ESS ratio of the trajectories of one age; old ones lose it first.",
        heatmap=Heatmap(table=STEPS, categories=tuple(map(_bucket_label, lags)), cells=cells),
    )


def _mismatch(steps: Sequence[StepRecord]) -> Chart:
    def entry(name: str) -> StepValue:
        return lambda step: step.mismatch.get(name) or None

    dashed = CurveStyle.REFERENCE
    return Chart(
        name="mismatch",
        title="Mismatch at equal version",
        unit="|log pi - log mu|, nats per token, log",
        caption="Fresh tokens hold no staleness: up to the limit it is rounding, above it a fault "
        "of the engines, or of one worker.",
        curves=(
            _line("worst worker", steps, entry("worst_gap_nats"), Ink.SECOND, CurveStyle.THIN),
            _line("99th percentile", steps, entry("gap_p99_nats"), Ink.SOFT, CurveStyle.THIN),
            _line("mean", steps, entry("gap_nats")),
            _line("limit", steps, entry("limit_nats"), Ink.LIMIT, dashed),
        ),
        is_log=True,
    )


def _bucket_label(lag: int) -> str:
    later = [each for each in LAG_BUCKETS if each > lag]
    if not later:
        return f"{lag}+"
    return str(lag) if later[0] == lag + 1 else f"{lag}-{later[0] - 1}"


def _drops(steps: Sequence[StepRecord]) -> Chart:
    return Chart(
        name="drops",
        title="Dropped",
        unit="trajectories so far",
        caption="By reason; a steep curve is work of the workers that is lost.",
        curves=_by_name(steps, lambda step: step.dropped, missing=0),
        low=0.0,
        is_whole=True,
    )


def _seconds(steps: Sequence[StepRecord]) -> Chart:
    return Chart(
        name="seconds",
        title="Time of a step",
        unit="seconds",
        caption="A learner that waits longer than it computes needs more workers.",
        curves=(
            _line("waiting", steps, lambda step: step.idle_s, Ink.SECOND, CurveStyle.THIN),
            _line("computing", steps, lambda step: step.step_s, style=CurveStyle.THIN),
            *_by_name(steps, lambda step: step.stage_s, inks=CATEGORIES[2:]),
        ),
        low=0.0,
    )


def _reward_parts(steps: Sequence[StepRecord]) -> Chart:
    return Chart(
        name="reward-parts",
        title="Parts of the reward",
        unit="mean per trajectory",
        caption="A part that rises alone may be one that the policy learned to please.",
        curves=_by_name(steps, lambda step: step.reward_parts),
    )


def _response_length(steps: Sequence[StepRecord]) -> Chart:
    thin = CurveStyle.THIN
    return Chart(
        name="response-length",
        title="Response length",
        unit="tokens",
        caption="A sudden change often comes before a change of the reward.",
        curves=(
            _line("p95", steps, lambda step: step.response_tokens_p95, Ink.SECOND, thin),
            _line("median", steps, lambda step: step.response_tokens_p50, Ink.THIRD, thin),
            _line("p5", steps, lambda step: step.response_tokens_p05, Ink.FOURTH, thin),
            _smooth(_line("mean", steps, lambda step: step.response_tokens_mean), "mean, smoothed"),
        ),
        low=0.0,
    )


def _throughput_per_worker(steps: Sequence[StepRecord]) -> Chart:
    mean = _line(
        "tokens/s",
        steps,
        lambda step: step.tokens_per_s / step.workers if step.workers else None,
    )
    return Chart(
        name="throughput-per-worker",
        title="Throughput of a worker",
        unit="tokens per second, mean",
        caption="Falls when workers wait for leases or share a machine.",
        curves=_with_trend(mean),
        low=0.0,
    )


def _queue(steps: Sequence[StepRecord]) -> Chart:
    return Chart(
        name="queue",
        title="Work in progress",
        unit="trajectories",
        caption="With an empty buffer the learner waits; in a full buffer data becomes old.",
        curves=(
            _line("in flight", steps, lambda step: step.in_flight, Ink.SECOND, CurveStyle.THIN),
            _line("buffered", steps, lambda step: step.buffered, style=CurveStyle.THIN),
        ),
        low=0.0,
        is_whole=True,
    )


def _line(
    label: str,
    steps: Sequence[StepRecord],
    value: StepValue,
    ink: Ink = Ink.MAIN,
    style: CurveStyle = CurveStyle.LINE,
) -> Curve:
    values = column(map(value, steps))
    return Curve(label=label, table=STEPS, values=values, ink=ink, style=style)


def _by_name(
    steps: Sequence[StepRecord],
    entries: Callable[[StepRecord], Mapping[str, float]],
    *,
    missing: float | None = None,
    inks: Sequence[Ink] = CATEGORIES,
) -> tuple[Curve, ...]:
    """Return a curve for each entry of a mapping; of many, some share an ink.

    missing: value of a step without the entry.
    """
    names = sorted({name for step in steps for name in entries(step)})
    return tuple(
        Curve(
            label=name,
            table=STEPS,
            values=column(entries(step).get(name, missing) for step in steps),
            ink=ink,
        )
        for name, ink in zip(names, cycle(inks), strict=False)
    )


def _with_trend(line: Curve) -> tuple[Curve, ...]:
    """Return the values with a smoothed curve in front; few values have none."""
    if len(line.values) < _FEWEST_SMOOTHED:
        return (line,)
    window = smoothing_window(len(line.values))
    raw = replace(line, label="each step", style=CurveStyle.RAW)
    return raw, _smooth(line, f"mean of {window}")


def _smooth(line: Curve, label: str) -> Curve:
    if len(line.values) < _FEWEST_SMOOTHED:
        return line
    window = smoothing_window(len(line.values))
    values = rolling_mean(line.values, window=window)
    return replace(line, label=label, values=values, is_smooth=True)
