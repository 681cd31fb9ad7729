"""The charts of a report: what each shows, and their data for the page's script.

Curves are columns of a table, and all columns of a table share its rows: the steps of a run, or its
evaluations. Of a long run each row stands for some steps, and a curve has their least and largest
value, so no spike is lost. The page's style sheet has the colors and the widths of curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from typing import Any, Final

from vcpo.algo.health.early_warning import CRITICAL_SCORE, WARN_SCORE
from vcpo.algo.health.lag_breakdown import LAG_BUCKETS
from vcpo.api import VCPORun
from vcpo.api.optimizer import FINAL_LEARNING_RATE_RATIO, Schedule
from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import StepRecord
from vcpo.report.numbers import compact
from vcpo.report.recorded_run import RecordedRun

MAX_ROWS: Final = 1000
"""Most rows that are drawn of a table; a screen has few more pixels."""
_FEWEST_SMOOTHED: Final = 20
"""Curves of fewer points are not smoothed."""
_LARGEST: Final = 1e300
"""Largest number that is drawn; sums of larger ones would overflow."""
_INKS: Final = tuple(f"ink-{number}" for number in range(1, 9))
OFF_POLICY, UPDATE, SPEED = "How far off policy", "What makes the update", "Speed and responses"

Column = list[float | None]
"""One number for each row of a table; None is a gap."""
StepValue = Callable[[StepRecord], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A number of each step."""

    label: str
    value: StepValue
    ink: str = "ink-1"
    style: str = "line"
    """`line`, `thin` for one of secondary interest, or `reference` to compare the others with."""
    is_noisy: bool = False
    """Whether a smoothed curve is drawn in front of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows, and how to read it."""

    name: str
    """Identifier in the page, e.g. `ess`."""
    title: str
    unit: str
    """Unit of the vertical axis, in words."""
    caption: str
    """One sentence or two."""
    topic: str = ""
    """Question that it helps to answer; empty for a main chart."""
    curves: tuple[Curve, ...] = ()
    by_name: Callable[[StepRecord], Mapping[str, float]] | None = None
    """Gives a curve for each entry of a step's mapping."""
    missing: float | None = None
    """Value of a step without such an entry."""
    low: float | None = 0.0
    """Least value on the vertical axis; None fits the data."""
    high: float | None = None
    is_whole: bool = False
    """Whether only whole numbers may stand on the vertical axis."""
    is_log: bool = False


def _small(
    topic: str, title: str, unit: str, label: str, caption: str, name: str, **more: Any
) -> Chart:
    """Return the small chart of one field of a step, or of one of its diagnostics.

    name: of the field; `is_noisy` and `value` are of its curve, the others of the chart.
    """

    def value(step: StepRecord) -> float | None:
        found: float | None = getattr(step, name, None)
        return step.diagnostics.get(name) if found is None else found

    return Chart(
        name=name.replace("_", "-"),
        title=title,
        unit=unit,
        caption=caption,
        topic=topic,
        curves=(
            Curve(
                label=label,
                value=more.pop("value", value),
                is_noisy=more.pop("is_noisy", True),
            ),
        ),
        **more,
    )


def _of_weights(name: str) -> StepValue:
    return lambda step: getattr(step, name) if step.has_weights else None


def _of_update(name: str) -> StepValue:
    return lambda step: None if step.skipped is not None else getattr(step, name)


def _of_mismatch(name: str) -> StepValue:
    return lambda step: step.mismatch.get(name) or None


_REWARD: Final = Chart(
    name="reward",
    title="Reward",
    unit="mean per trajectory",
    caption="Should rise; dots are evaluations on held-out prompts.",
    curves=(Curve(label="training", value=lambda step: step.reward_mean, is_noisy=True),),
    low=None,
)
_WARNING: Final = Chart(
    name="warning",
    title="Early warning",
    unit="severity of the worst sign",
    caption="From 1/3 the batches are far off policy; from 2/3 runs have collapsed; 1 is dead.",
    curves=(Curve(label="score", value=lambda step: step.warning_score),),
    high=1.0,
)
_ESS: Final = Chart(
    name="ess",
    title="ESS ratio",
    unit="effective share of the batch",
    caption="Near the dashed line the data is as good as fresh data; near zero a few trajectories"
    " make up the whole update.",
    curves=(
        Curve(label="ESS ratio", value=_of_weights("ess_ratio"), is_noisy=True),
        Curve(
            label="on-policy",
            value=lambda step: step.on_policy_ess_ratio,
            ink="ink-soft",
            style="reference",
        ),
    ),
)
_ESS_BY_LAG: Final = Chart(
    name="ess-by-lag",
    title="ESS ratio by lag",
    unit="policy versions",
    caption="A cell is the ESS ratio of the trajectories of one age; old ones lose it first.",
)
_DETAILS: Final = (
    _small(
        OFF_POLICY,
        "Token ESS ratio",
        "effective share of the tokens",
        "token ESS",
        "Speaks where responses are so long that the ESS ratio of trajectories is low.",
        "token_ess_ratio",
    ),
    _small(
        OFF_POLICY,
        "Divergence",
        "KL, nats per token, log",
        "KL",
        "Distance of the learner from the policy that sampled the batch.",
        "kl_per_token",
        is_log=True,
        low=None,
    ),
    Chart(
        name="mismatch",
        topic=OFF_POLICY,
        title="Mismatch at equal version",
        unit="|log pi - log mu|, nats per token, log",
        caption="Fresh tokens hold no staleness: up to the limit it is rounding, above it a fault"
        " of the engines, or of one worker.",
        curves=(
            Curve(label="worst worker", value=_of_mismatch("worst_gap_nats"), ink="ink-2"),
            Curve(label="99th percentile", value=_of_mismatch("gap_p99_nats"), ink="ink-soft"),
            Curve(label="mean", value=_of_mismatch("gap_nats")),
            Curve(
                label="limit", value=_of_mismatch("limit_nats"), ink="ink-limit", style="reference"
            ),
        ),
        low=None,
        is_log=True,
    ),
    Chart(
        name="queue",
        topic=OFF_POLICY,
        title="Work in progress",
        unit="trajectories",
        caption="With an empty buffer the learner waits; in a full buffer data becomes old.",
        curves=(
            Curve(label="in flight", value=lambda step: step.in_flight, ink="ink-2", style="thin"),
            Curve(label="buffered", value=lambda step: step.buffered, style="thin"),
        ),
        is_whole=True,
    ),
    Chart(
        name="drops",
        topic=OFF_POLICY,
        title="Dropped",
        unit="trajectories so far",
        caption="By reason; a steep curve is work of the workers that is lost.",
        by_name=lambda step: step.dropped,
        missing=0,
        is_whole=True,
    ),
    _small(
        UPDATE,
        "Largest weight",
        "before truncation, log",
        "weight",
        "One trajectory of a large weight can decide the whole update.",
        "importance_weight_max",
        value=_of_weights("importance_weight_max"),
        is_log=True,
        low=None,
    ),
    _small(
        UPDATE,
        "Gradient norm",
        "before clipping",
        "norm",
        "Spikes together with a low ESS ratio come from a few heavy weights.",
        "gradient_norm",
        value=_of_update("gradient_norm"),
    ),
    _small(
        UPDATE,
        "Baseline shift",
        "reward",
        "shift",
        "Distance of the baseline from its group's mean reward; 0 is no correction.",
        "baseline_shift",
        value=_of_weights("baseline_shift"),
        low=None,
    ),
    _small(
        UPDATE,
        "Groups that teach nothing",
        "share whose rewards are equal",
        "equal",
        "Their responses have no gradient; at 1 the step is skipped.",
        "equal_groups_ratio",
    ),
    Chart(
        name="reward-parts",
        topic=UPDATE,
        title="Parts of the reward",
        unit="mean per trajectory",
        caption="A part that rises alone may be one that the policy learned to please.",
        by_name=lambda step: step.reward_parts,
        low=None,
    ),
    _small(
        SPEED,
        "Surprisal",
        "nats per token",
        "surprisal",
        "Estimates the behavior policy's entropy; near 0 it samples one response only.",
        "surprisal_nats",
    ),
    _small(
        SPEED,
        "Cut responses",
        "share at sampling.maxNewTokens",
        "cut",
        "A response that is cut before its answer is judged without it.",
        "cut_responses_ratio",
    ),
    _small(
        SPEED,
        "Prompt length",
        "tokens, mean",
        "tokens",
        "With its template. Prompt and response share the model's context.",
        "prompt_tokens_mean",
    ),
    _small(
        SPEED,
        "Response length",
        "tokens, mean",
        "tokens",
        "A sudden change often comes before a change of the reward.",
        "response_tokens_mean",
    ),
    _small(
        SPEED,
        "Throughput",
        "tokens per second",
        "tokens/s",
        "Response tokens accepted by the learner.",
        "tokens_per_s",
    ),
    _small(
        SPEED,
        "Rollout workers",
        "heard of lately",
        "workers",
        "The curve falls when workers are lost or removed.",
        "workers",
        is_noisy=False,
        is_whole=True,
    ),
    Chart(
        name="seconds",
        topic=SPEED,
        title="Time of a step",
        unit="seconds",
        caption="A learner that waits longer than it computes needs more workers.",
        by_name=lambda step: {"waiting": step.idle_s, "computing": step.step_s, **step.stage_s},
    ),
    _small(
        SPEED,
        "Memory of the learner",
        "GiB resident at most, rank 0",
        "GiB",
        "It grows where a step or a checkpoint needs more than all before it.",
        "learner_peak_gibibytes",
        is_noisy=False,
    ),
    _small(
        SPEED,
        "Memory of a worker",
        "GiB resident at most, the largest worker",
        "GiB",
        "Of the worker's process; the processes of engine vllm are not in it.",
        "worker_peak_gibibytes",
        is_noisy=False,
    ),
)


def main_charts(run: VCPORun) -> tuple[Chart, ...]:
    """Return the charts that show whether a run is healthy, in reading order."""
    return (_REWARD, _WARNING, _ESS, _rate(run), _lag(run), _ESS_BY_LAG)


def sections() -> dict[str, tuple[Chart, ...]]:
    """Return the smaller charts, which help to find the cause, by topic."""
    return {
        topic: tuple(chart for chart in _DETAILS if chart.topic == topic)
        for topic in (OFF_POLICY, UPDATE, SPEED)
    }


def _rate(run: VCPORun) -> Chart:
    settings, course = run.spec.optimizer, ""
    if settings.warmup_steps:
        course = f" after {settings.warmup_steps} updates"
    if settings.schedule is not Schedule.CONSTANT:
        final = compact(settings.learning_rate * FINAL_LEARNING_RATE_RATIO)
        course += f", then falls to {final} ({settings.schedule})"
    factors = {
        "schedule": ("learning_rate_schedule", "ink-soft"),
        "ESS": ("learning_rate_scale", "ink-2"),
        "backoff": ("learning_rate_backoff", "ink-3"),
    }
    return Chart(
        name="step-size",
        title="Effective learning rate",
        unit="share of optimizer.learningRate",
        caption="The rate that was taken is schedule x ESS x backoff of it. VCPO takes smaller"
        " steps on data that it cannot trust; critical warnings and rollbacks halve the backoff."
        f" The base rate is {compact(settings.learning_rate)}{course}.",
        curves=(
            Curve(
                label="effective",
                value=lambda step: step.effective_rate.share if step.effective_rate else None,
                is_noisy=True,
            ),
            *(
                Curve(label=label, value=_of_update(name), ink=ink, style="thin")
                for label, (name, ink) in factors.items()
            ),
        ),
        high=1.0,
    )


def _lag(run: VCPORun) -> Chart:
    allowed = run.spec.algorithm.max_policy_lag_steps
    return Chart(
        name="lag",
        title="Policy lag",
        unit="policy versions",
        caption="Age of the trained tokens. The throttle lowers the lag limit; no token is older"
        " than `maxPolicyLagSteps`.",
        curves=(
            Curve(label="max", value=lambda step: step.lag_max, ink="ink-2", style="thin"),
            Curve(label="p50", value=lambda step: step.lag_p50, ink="ink-soft", style="thin"),
            Curve(label="mean", value=lambda step: step.lag_mean),
            Curve(label="lag limit", value=lambda step: step.lag_limit_steps, ink="ink-3"),
            Curve(
                label=f"most {allowed}",
                value=lambda _: allowed,
                ink="ink-limit",
                style="reference",
            ),
        ),
        is_whole=True,
    )


def page_data(recorded: RecordedRun) -> dict[str, Any]:
    """Return the data of all charts as plain JSON."""
    steps, clock = recorded.metrics.steps, recorded.clock
    tables: dict[str, Sequence[StepRecord | EvaluationRecord]] = {
        "steps": steps,
        "evaluations": recorded.metrics.evaluations,
    }
    rows = {name: max(1, math.ceil(len(found) / MAX_ROWS)) for name, found in tables.items()}
    skips = sorted({step.skipped for step in steps if step.skipped is not None})
    return {
        "tables": {
            name: {
                "rows": rows[name],
                "step": [record.step for record in found[:: rows[name]]],
                "time": [
                    round(clock.elapsed_s(record.time_unix_s), 1) for record in found[:: rows[name]]
                ],
            }
            for name, found in tables.items()
        },
        "charts": [
            _chart_data(chart, recorded, rows) for chart in (*main_charts(recorded.run), *_DETAILS)
        ],
        "marks": [
            {
                "label": f"skipped: {reason}",
                "step": [step.step for step in steps if step.skipped == reason],
                "time": [
                    round(clock.elapsed_s(step.time_unix_s), 1)
                    for step in steps
                    if step.skipped == reason
                ],
            }
            for reason in skips
        ],
    }


def _chart_data(chart: Chart, recorded: RecordedRun, rows: Mapping[str, int]) -> dict[str, Any]:
    steps = recorded.metrics.steps
    curves = [
        drawn for curve in _curves(chart, steps) for drawn in _curve_data(curve, steps, rows, chart)
    ]
    if chart is _REWARD:
        held_out = _column(each.accuracy for each in recorded.metrics.evaluations)
        head = {"label": "held out", "ink": "ink-2", "style": "dots", "table": "evaluations"}
        curves.append({**head, **_thinned(held_out, rows["evaluations"])})
    bands = [(WARN_SCORE, CRITICAL_SCORE, "warn"), (CRITICAL_SCORE, 1.0, "critical")]
    return {
        "name": chart.name,
        "title": chart.title,
        "low": chart.low,
        "high": chart.high,
        "whole": chart.is_whole,
        "log": chart.is_log,
        "bands": [
            {"low": low, "high": high, "level": level}
            for low, high, level in (bands if chart is _WARNING else [])
        ],
        "curves": curves,
        "heatmap": _cells(steps, rows["steps"]) if chart is _ESS_BY_LAG else None,
    }


def _curves(chart: Chart, steps: Sequence[StepRecord]) -> Iterable[Curve]:
    """Yield the curves of a chart; of many entries, some share an ink."""
    yield from chart.curves
    if (entries := chart.by_name) is not None:
        names = sorted({name for step in steps for name in entries(step)})
        for name, ink in zip(names, cycle(_INKS), strict=False):
            yield Curve(label=name, value=partial(_entry, chart, name), ink=ink)


def _entry(chart: Chart, name: str, step: StepRecord) -> float | None:
    assert chart.by_name is not None
    return chart.by_name(step).get(name, chart.missing)


def _curve_data(
    curve: Curve, steps: Sequence[StepRecord], rows: Mapping[str, int], chart: Chart
) -> Iterable[dict[str, Any]]:
    """Yield a curve, and its smoothed version in front of it if it is long and noisy."""
    head = {"label": curve.label, "ink": curve.ink, "style": curve.style, "table": "steps"}
    values = _column(map(curve.value, steps))
    if chart.is_log:
        values = [value if (value or 0.0) > 0.0 else None for value in values]
    if not curve.is_noisy or len(values) < _FEWEST_SMOOTHED:
        yield {**head, **_thinned(values, rows["steps"])}
        return
    window = max(5, len(values) // 20 | 1)
    yield {**head, "label": "each step", "style": "raw", **_thinned(values, rows["steps"])}
    smooth = _smoothed(values, window)[:: rows["steps"]]
    yield {**head, "label": f"mean of {window}", "low": [_short(value) for value in smooth]}


def _column(values: Iterable[float | None]) -> Column:
    return [None if value is None or not abs(value) <= _LARGEST else value for value in values]


def _smoothed(values: Column, window: int) -> Column:
    """Return centered means over an odd window without gaps; it is shorter near the ends."""
    sums = list(accumulate((value or 0.0 for value in values), initial=0.0))
    counts = list(accumulate((value is not None for value in values), initial=0))
    smooth: Column = []
    for index, value in enumerate(values):
        first, past_last = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        number = counts[past_last] - counts[first]
        smooth.append(None if value is None else (sums[past_last] - sums[first]) / number)
    return smooth


def _thinned(values: Column, rows: int) -> dict[str, Column]:
    """Return the least values of every so many rows, and the largest."""
    if rows == 1:
        return {"low": [_short(value) for value in values]}
    buckets = [
        [value for value in values[first : first + rows] if value is not None]
        for first in range(0, len(values), rows)
    ]
    return {
        "low": [_short(min(known, default=None)) for known in buckets],
        "high": [_short(max(known, default=None)) for known in buckets],
    }


def _cells(steps: Sequence[StepRecord], rows: int) -> dict[str, Any]:
    """Return a row of cells for each bucket of lags; of several steps the least value."""
    seen = {int(lag) for step in steps for lag in step.ess_by_lag}
    lags = [lag for lag in LAG_BUCKETS if lag in seen]
    columns = (_column(step.ess_by_lag.get(str(lag)) for step in steps) for lag in lags)
    return {
        "table": "steps",
        "categories": [_bucket_label(lag) for lag in lags],
        "cells": [
            [None if cell is None else round(cell, 2) for cell in _thinned(column, rows)["low"]]
            for column in columns
        ],
    }


def _bucket_label(lag: int) -> str:
    later = [each for each in LAG_BUCKETS if each > lag]
    if not later:
        return f"{lag}+"
    return str(lag) if later[0] == lag + 1 else f"{lag}-{later[0] - 1}"


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")
