"""The charts of a report: what each shows, and their data for the page's script.

Curves are columns of a table, and all columns of a table share its rows: the steps of a run, or its
evaluations. Of a long run each row stands for some steps, and a curve has their least and largest
value, so no spike is lost. The page's style sheet has the colors and the widths of curves.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from typing import Any, Final

from vcpo.algo.health.diagnostics import LAG_BUCKETS
from vcpo.algo.health.early_warning import CRITICAL_SCORE, WARN_SCORE
from vcpo.api import VCPORun
from vcpo.judgement import skip_cause
from vcpo.records.journal import EvaluationRecord
from vcpo.records.reasons import drop_words
from vcpo.records.step_record import StepRecord
from vcpo.report.numbers import compact
from vcpo.report.outcome import band_of, scale_words
from vcpo.report.recorded_run import RecordedRun

MAX_ROWS: Final = 1000
"""Most rows that are drawn of a table; a screen has few more pixels."""
_FEWEST_SMOOTHED: Final = 20
_LEAST_LOG: Final = 1e-6
"""Share of the largest number that is drawn on a logarithmic axis."""
_LARGEST: Final = 1e300
"""Largest number that is drawn; sums of larger ones would overflow."""
_INKS: Final = tuple(f"ink-{number}" for number in range(1, 9))
OFF_POLICY, UPDATE, SPEED = "How far off policy", "What makes the update", "Speed and responses"

Column = list[float | None]
"""One number for each row of a table; None is a gap."""
StepValue = Callable[[StepRecord], float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of each step."""

    label: str
    value: StepValue
    ink: str = "ink-1"
    style: str = "line"
    """`line`, `thin` for one of secondary interest, or `reference` to compare the others with."""
    is_noisy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows, and how to read it."""

    name: str
    title: str
    unit: str
    caption: str
    topic: str = ""
    curves: tuple[Curve, ...] = ()
    by_name: Callable[[StepRecord], Mapping[str, float]] | None = None
    missing: float | None = None
    low: float | None = 0.0
    """Least value on the vertical axis; None fits the data."""
    high: float | None = None
    is_whole: bool = False
    is_log: bool = False


_OF_WEIGHTS: Final = frozenset({"ess_ratio", "importance_weight_max", "baseline_shift"})
_LOGARITHMIC: Final = frozenset({"importance_weight_max", "kl_per_token"})


def _small(topic: str, table: str) -> Iterator[Chart]:
    """Yield charts of one field of a step each, or of its diagnostics.

    table: `field | title | unit | label`, and below it the caption.
    """
    lines = table.strip().split("\n")
    for head, caption in zip(lines[::2], lines[1::2], strict=True):
        name, title, unit, label = head.split(" | ")
        is_whole = name == "workers"
        yield Chart(
            name=name.replace("_", "-"),
            title=title,
            unit=unit,
            caption=caption.strip(),
            topic=topic,
            curves=(Curve(label, partial(_number, name), is_noisy=not is_whole),),
            low=None if name in {*_LOGARITHMIC, "baseline_shift"} else 0.0,
            is_whole=is_whole,
            is_log=name in _LOGARITHMIC,
        )


def _number(name: str, step: StepRecord) -> float | None:
    is_of_update = name == "gradient_norm" or name.startswith("learning_rate")
    if (is_of_update and step.skipped) or (name in _OF_WEIGHTS and not step.has_weights):
        return None
    found: float | None = getattr(step, name, None)
    return step.diagnostics.get(name) if found is None else found


def _of_mismatch(name: str) -> StepValue:
    return lambda step: step.mismatch.get(name) or None


_REWARD: Final = Chart(
    name="reward",
    title="Reward",
    unit="mean per trajectory",
    caption="Should rise; dots are evaluations on held-out prompts, red marks skipped steps.",
    curves=(Curve("training", lambda step: step.reward_mean, is_noisy=True),),
    low=None,
)
_WARNING: Final = Chart(
    name="warning",
    topic=OFF_POLICY,
    title="Early warning",
    unit="severity of the worst sign",
    caption="From 1/3 the batches are far off policy; from 2/3 runs have collapsed; 1 is lost.",
    curves=(Curve("score", lambda step: step.warning_score),),
    high=1.0,
)
_ESS: Final = Chart(
    name="ess",
    title="ESS ratio",
    unit="effective share of the batch",
    caption="Near the dashed line the data is as good as fresh data; near zero a few trajectories"
    " make up the whole update.",
    curves=(
        Curve("ESS ratio", partial(_number, "ess_ratio"), is_noisy=True),
        Curve("on-policy", lambda step: step.on_policy_ess_ratio, "ink-soft", "reference"),
    ),
)
_ESS_BY_LAG: Final = Chart(
    name="ess-by-lag",
    title="ESS ratio by lag",
    unit="policy versions",
    caption="A row has the ages from its label up to the next; old ones lose ESS first.",
)
_DETAILS: Final = (
    _WARNING,
    *_small(
        OFF_POLICY,
        """
token_ess_ratio | Token ESS ratio | effective share of the tokens | token ESS
  Matters when responses are so long that the ESS ratio of trajectories is low.
kl_per_token | Divergence | KL, nats per token, log | KL
  Distance of the learner from the policy that sampled the batch.
""",
    ),
    Chart(
        name="mismatch",
        topic=OFF_POLICY,
        title="Mismatch at equal version",
        unit="|log pi - log mu|, nats per token, log",
        caption="Of tokens that are not stale. Up to the limit it is rounding; above it an engine"
        " or a worker is wrong.",
        curves=(
            Curve("worst worker", _of_mismatch("worst_gap_nats"), ink="ink-2"),
            Curve("99th percentile", _of_mismatch("gap_p99_nats"), ink="ink-soft"),
            Curve("mean", _of_mismatch("gap_nats")),
            Curve("limit", _of_mismatch("limit_nats"), "ink-limit", "reference"),
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
            Curve("in flight", lambda step: step.in_flight, "ink-2", "thin"),
            Curve("buffered", lambda step: step.buffered, style="thin"),
        ),
        is_whole=True,
    ),
    Chart(
        name="drops",
        topic=OFF_POLICY,
        title="Dropped",
        unit="trajectories so far",
        caption="By reason; a steep curve is work of the workers that is lost.",
        by_name=lambda step: {drop_words(name): count for name, count in step.dropped.items()},
        missing=0,
        is_whole=True,
    ),
    *_small(
        UPDATE,
        """
importance_weight_max | Largest weight | before truncation, log | weight
  One trajectory of a large weight can decide the whole update.
gradient_norm | Gradient norm | before clipping | norm
  Spikes together with a low ESS ratio come from a few heavy weights.
baseline_shift | Baseline shift | reward | shift
  Distance of the baseline from its group's mean reward; 0 is no correction.
equal_groups_ratio | Groups that teach nothing | share whose rewards are equal | equal
  Such groups have no gradient; at 1 the step is skipped.
""",
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
    *_small(
        SPEED,
        """
surprisal_nats | Surprisal | nats per token | surprisal
  Estimates the behavior policy's entropy; near 0 it samples one response only.
cut_responses_ratio | Cut responses | share at sampling.maxNewTokens | cut
  A response that is cut before its answer is scored without it.
response_tokens_mean | Response length | tokens, mean | tokens
  A sudden change often comes before a change of the reward.
tokens_per_s | Throughput | tokens per second | tokens/s
  Response tokens accepted by the learner.
workers | Rollout workers | heard of lately | workers
  The curve falls when workers are lost or removed.
""",
    ),
    Chart(
        name="seconds",
        topic=SPEED,
        title="Time of a step",
        unit="seconds",
        caption="A learner that waits longer than it computes needs more workers.",
        by_name=lambda step: {"waiting": step.idle_s, "computing": step.step_s, **step.stage_s},
    ),
)


_MANY: Final = frozenset(each.name for each in _DETAILS if each.by_name is not None)


def main_charts(run: VCPORun) -> tuple[Chart, ...]:
    """Return the charts that show whether a run is healthy, in reading order."""
    return (_REWARD, _ESS, _rate(run), _lag(run), _ESS_BY_LAG)


def sections() -> dict[str, tuple[Chart, ...]]:
    """Return the smaller charts, which help to find the cause, by topic."""
    return {
        topic: tuple(chart for chart in _DETAILS if chart.topic == topic)
        for topic in (OFF_POLICY, UPDATE, SPEED)
    }


def _rate(run: VCPORun) -> Chart:
    scale = scale_words(run.spec.algorithm)
    factors = {
        "schedule": ("learning_rate_schedule", "ink-soft"),
        scale: ("learning_rate_scale", "ink-2"),
        "backoff": ("learning_rate_backoff", "ink-3"),
    }
    return Chart(
        name="step-size",
        title="Effective learning rate",
        unit="share of optimizer.learningRate",
        caption=f"Learning rate used = base rate x schedule x {scale} x backoff. Critical warnings"
        " and rollbacks halve the backoff. The trust region begins low and rises as steps prove"
        f" safe. The base rate is {compact(run.spec.optimizer.learning_rate)}.",
        curves=(
            Curve(
                "effective",
                lambda step: step.effective_rate.share if step.effective_rate else None,
                is_noisy=True,
            ),
            *(
                Curve(label, partial(_number, name), ink, "thin")
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
        " than maxPolicyLagSteps.",
        curves=(
            Curve("max", lambda step: step.lag_max, "ink-2", "thin"),
            Curve("p50", lambda step: step.lag_p50, "ink-soft", "thin"),
            Curve("mean", lambda step: step.lag_mean),
            Curve("lag limit", lambda step: step.lag_limit_steps, "ink-3"),
            Curve(f"most {allowed}", lambda _: allowed, "ink-limit", "reference"),
        ),
        is_whole=True,
    )


def page_data(recorded: RecordedRun, *others: RecordedRun) -> dict[str, Any]:
    """Return the data of all charts as plain JSON.

    others: runs whose main curves lie over the first one's, each in an ink of its own.
    """
    if not others:
        tables, charts = _tables(recorded), _charts_of(recorded)
    else:
        tables, overlaid = {}, []
        for number, run in enumerate((recorded, *others), start=1):
            tables.update(_tables(run, f" {number}"))
            overlaid.append([_overlaid(each, run, number) for each in _charts_of(run)])
        charts = [
            {**alike[0], "curves": [curve for each in alike for curve in each["curves"]]}
            for alike in zip(*overlaid, strict=True)
        ]
    skipped: dict[str, list[StepRecord]] = {}
    for step in recorded.metrics.steps if not others else ():
        if step.skipped is not None:
            skipped.setdefault(skip_cause(step.skipped), []).append(step)
    marks = [
        {"label": f"skipped: {cause}", **_places(recorded, steps)}
        for cause, steps in sorted(skipped.items())
    ]
    return {"tables": tables, "charts": charts, "marks": marks}


def _tables(recorded: RecordedRun, suffix: str = "") -> dict[str, dict[str, Any]]:
    records: dict[str, Sequence[StepRecord | EvaluationRecord]] = {
        "steps": recorded.metrics.steps,
        "evaluations": recorded.metrics.evaluations,
    }
    return {
        f"{name}{suffix}": {"rows": (rows := _rows_of(found)), **_places(recorded, found[::rows])}
        for name, found in records.items()
    }


def _places(
    recorded: RecordedRun, records: Sequence[StepRecord | EvaluationRecord]
) -> dict[str, list[float]]:
    elapsed_s = [recorded.clock.elapsed_s(each.time_unix_s) for each in records]
    return {"step": [each.step for each in records], "time": [round(each, 1) for each in elapsed_s]}


def _rows_of(records: Sequence[object]) -> int:
    return max(1, math.ceil(len(records) / MAX_ROWS))


def _charts_of(recorded: RecordedRun) -> list[dict[str, Any]]:
    return [_chart_data(chart, recorded) for chart in (*main_charts(recorded.run), *_DETAILS)]


def _overlaid(chart: Mapping[str, Any], run: RecordedRun, number: int) -> dict[str, Any]:
    """Return a chart with its main curve alone, under the name of its run."""
    ink, name = _INKS[number - 1], run.run_dir.name or run.run.metadata.name
    curves = [
        {**each, "ink": ink, "table": f"{each['table']} {number}", "label": label}
        for each in chart["curves"]
        if chart["name"] not in _MANY
        if (each["ink"] == _INKS[0] and each["style"] == "line") or each["style"] == "dots"
        for label in [f"{name}, held out" if each["style"] == "dots" else name]
    ]
    return {**chart, "curves": curves, "heatmap": None}


def _chart_data(chart: Chart, recorded: RecordedRun) -> dict[str, Any]:
    steps, evaluations = recorded.metrics.steps, recorded.metrics.evaluations
    curves = [
        drawn for curve in _curves(chart, steps) for drawn in _curve_data(curve, steps, chart)
    ]
    if chart is _REWARD:
        rows, head = _rows_of(evaluations), {"ink": "ink-2", "table": "evaluations"}
        for label, side in [("held out", 0.0), ("chance", -1.0), ("chance", 1.0)]:
            column = _column(each.accuracy + side * band_of(each) for each in evaluations)
            style = "reference" if side else "dots"
            curves.append({**head, "label": label, "style": style, **_thinned(column, rows)})
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
        "heatmap": _cells(steps, _rows_of(steps)) if chart is _ESS_BY_LAG else None,
    }


def _curves(chart: Chart, steps: Sequence[StepRecord]) -> Iterable[Curve]:
    yield from chart.curves
    if (entries := chart.by_name) is not None:
        names = sorted({name for step in steps for name in entries(step)})
        for name, ink in zip(names, cycle(_INKS), strict=False):
            yield Curve(name, partial(_entry, chart, name), ink=ink)


def _entry(chart: Chart, name: str, step: StepRecord) -> float | None:
    assert chart.by_name is not None
    return chart.by_name(step).get(name, chart.missing)


def _curve_data(
    curve: Curve, steps: Sequence[StepRecord], chart: Chart
) -> Iterable[dict[str, Any]]:
    """Yield a curve, and its smoothed version in front of it if it is long and noisy."""
    head = {"label": curve.label, "ink": curve.ink, "style": curve.style, "table": "steps"}
    values, rows = _column(map(curve.value, steps)), _rows_of(steps)
    if chart.is_log:  # a millionth of the largest is none: it would squeeze the others
        least = _LEAST_LOG * max((value for value in values if value is not None), default=0.0)
        values = [value if value is not None and value > least else None for value in values]
    if not curve.is_noisy or len(values) < _FEWEST_SMOOTHED:
        yield {**head, **_thinned(values, rows)}
        return
    window = max(5, len(values) // 20 | 1)
    yield {**head, "label": "each step", "style": "raw", **_thinned(values, rows)}
    smooth = _smoothed(values, window)[::rows]
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
        "categories": [f"{lag}+" if lag > 1 else str(lag) for lag in lags],
        "cells": [
            [None if cell is None else round(cell, 2) for cell in _thinned(column, rows)["low"]]
            for column in columns
        ],
    }


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")
