"""The charts of the report that each draw one number of the step record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.records.step_record import UpdateRecord


class ChartTopic(StrEnum):
    """Question that a chart helps to answer; the report shows the charts of a topic together."""

    OFF_POLICY = "How far off policy"
    UPDATE = "What makes the update"
    SPEED = "Speed and responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChart:
    """A small chart of the report that draws one number over all steps."""

    topic: ChartTopic
    title: str
    unit: str
    """Unit of the vertical axis, in words."""
    caption: str
    """How to read the curve: one sentence."""
    label: str
    """Name of the curve in the legend."""
    entry: str | None = None
    """Key of the number within its field, where the field is a mapping."""
    is_noisy: bool = True
    """Whether the report draws a smoothed curve in front of the values."""
    is_whole: bool = False
    """Whether the number is a count."""
    is_signed: bool = False
    """Whether the number may be below 0."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic; values of at most 0 are gaps on it."""
    is_of_update: bool = False
    """Whether only steps that made an update have it."""
    is_of_weights: bool = False
    """Whether only steps whose importance weights all have a value have it."""


CHARTS: Final = (
    (
        "surprisal_nats",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Surprisal",
            unit="nats per token",
            label="surprisal",
            caption="Estimates the behavior policy's entropy; near 0 it samples one response only.",
        ),
    ),
    (
        "importance_weight_max",
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Largest weight",
            unit="before truncation, log",
            label="weight",
            caption="One trajectory of a large weight can decide the whole update.",
            is_log=True,
            is_of_weights=True,
        ),
    ),
    (
        "gradient_norm",
        StepChart(
            topic=ChartTopic.UPDATE,
            is_of_update=True,
            title="Gradient norm",
            unit="before clipping",
            label="norm",
            caption="Spikes together with a low ESS ratio come from a few heavy weights.",
        ),
    ),
    (
        "baseline_shift",
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Baseline shift",
            unit="reward",
            label="shift",
            caption="Distance of the baseline from its group's mean reward; 0 is no correction.",
            is_signed=True,
            is_of_weights=True,
        ),
    ),
    (
        "diagnostics",
        StepChart(
            topic=ChartTopic.OFF_POLICY,
            entry="token_ess_ratio",
            title="Token ESS ratio",
            unit="effective share of the tokens",
            label="token ESS",
            caption="Speaks where responses are so long that the ESS ratio of trajectories is low.",
        ),
    ),
    (
        "diagnostics",
        StepChart(
            topic=ChartTopic.OFF_POLICY,
            entry="kl_per_token",
            title="Divergence",
            unit="KL, nats per token, log",
            label="KL",
            caption="Distance of the learner from the policy that sampled the batch.",
            is_log=True,
        ),
    ),
    (
        "diagnostics",
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="weight_concentration",
            title="Weight concentration",
            unit="largest weight over their sum",
            label="concentration",
            caption="At 1 one trajectory is the whole batch.",
        ),
    ),
    (
        "diagnostics",
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="baseline_weight_concentration",
            title="Baseline concentration",
            unit="largest OPOB weight over their sum",
            label="concentration",
            caption="At 1 one trajectory is the whole baseline of its group.",
        ),
    ),
    (
        "diagnostics",
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="top_gradient_share",
            title="Top gradient share",
            unit="share of the gradient norm",
            label="top 1 %",
            caption="Part of the update that comes from the top 1 % of the trajectories.",
            is_of_update=True,
        ),
    ),
    (
        "cut_responses_ratio",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Cut responses",
            unit="share at sampling.maxNewTokens",
            label="cut",
            caption="A response that is cut before its answer is judged without it.",
        ),
    ),
    (
        "equal_groups_ratio",
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Groups that teach nothing",
            unit="share whose rewards are equal",
            label="equal",
            caption="Their responses have no gradient; at 1 the step is skipped.",
        ),
    ),
    (
        "prompt_tokens_mean",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Prompt length",
            unit="tokens, mean",
            label="tokens",
            caption="With its template. Prompt and response share the model's context.",
        ),
    ),
    (
        "tokens_per_s",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Throughput",
            unit="tokens per second",
            label="tokens/s",
            caption="Response tokens accepted by the learner.",
        ),
    ),
    (
        "workers",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Rollout workers",
            unit="heard of lately",
            label="workers",
            caption="The curve falls when workers are lost or removed.",
            is_noisy=False,
            is_whole=True,
        ),
    ),
    (
        "learner_peak_gibibytes",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Memory of the learner",
            unit="GiB resident at most, rank 0",
            label="GiB",
            caption="It grows where a step or a checkpoint needs more than all before it.",
            is_noisy=False,
        ),
    ),
    (
        "worker_peak_gibibytes",
        StepChart(
            topic=ChartTopic.SPEED,
            title="Memory of a worker",
            unit="GiB resident at most, the largest worker",
            label="GiB",
            caption="Of the worker's process; the processes of engine vllm are not in it.",
            is_noisy=False,
        ),
    ),
)
"""Name of the field and the chart that draws it or an entry of it."""


def chart_value(record: UpdateRecord, field_name: str, chart: StepChart) -> float | None:
    """Return what a chart shows of a record; None is a gap."""
    if chart.is_of_update and record.skipped is not None:
        return None
    if chart.is_of_weights and not record.has_weights:
        return None
    found = getattr(record, field_name)
    value: float | None = found if chart.entry is None else found.get(chart.entry)
    return None if value is None or (chart.is_log and value <= 0.0) else value
