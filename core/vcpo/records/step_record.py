"""The record of one optimizer step, and where each of its numbers is shown.

A number of a step is declared here once, as a field. Its annotations say where it is shown:

    StepGauge     a metric of the learner holds the last step's value
    StepChart     the report draws a chart of it
    StepSignal    the learner's signals carry the last step's value

The journal (`metrics.jsonl`) holds every field under its own name, and the records of a study hold
those by which stale data is judged. Metrics, signals and report read the tables at the end of this
module. So a new number is written in two places: here, and in the update that computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from vcpo.records.effective_rate import EffectiveRate
from vcpo.records.step_chart import ChartTopic, StepChart, StepGauge, StepSignal, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one update did. Numbers are finite; mappings hold plain JSON values."""

    reward_mean: Annotated[
        float,
        StepGauge(
            name="vcpo_reward_mean",
            help="Mean reward of the last step's trajectories.",
            unit=Unit.REWARD,
        ),
    ]
    reward_window_mean: float | None = None
    """Mean reward of the last ten steps, which few rewards cannot bend, as collapses are judged by;
    None before there are ten."""
    reward_window_error: float = 0.0
    """Standard error of that mean."""
    response_tokens_mean: float
    """Mean length of the batch's responses, in tokens."""
    surprisal_nats: Annotated[
        float | None,
        StepGauge(
            name="vcpo_surprisal_nats",
            help="Mean of -log mu per sampled token of the last step; estimates policy entropy.",
        ),
        StepChart(
            topic=ChartTopic.SPEED,
            title="Surprisal",
            unit="nats per token",
            label="surprisal",
            caption="Estimates the behavior policy's entropy; near 0 it samples one response only.",
        ),
    ] = None
    """Mean of -log mu over the batch's sampled tokens, with mu as sampled from, temperature
    included; None when one has no value."""
    ess_ratio: Annotated[
        float,
        StepGauge(
            name="vcpo_ess_ratio",
            help="Effective sample size of the last step's batch over its size, untruncated.",
            is_of_weights=True,
        ),
    ] = 0.0
    """ESS ratio of the batch in [1/B, 1], read at `ess_kind`; 0 when a weight has no value."""
    on_policy_ess_ratio: Annotated[
        float,
        StepGauge(
            name="vcpo_on_policy_ess_ratio",
            help="ESS ratio at lag 0, given or calibrated; ESS is measured against it.",
        ),
    ]
    """ESS ratio at lag 0, in (0, 1]."""
    ess_kind: str = "sequence"
    """Length at which both ESS ratios are read: whole trajectories, blocks or tokens."""
    calibration_age_steps: Annotated[
        int,
        StepGauge(
            name="vcpo_calibration_age_steps",
            help="Optimizer steps since the on-policy ESS ratio was last measured on fresh tokens.",
        ),
        StepSignal(),
    ] = 0
    """Counts from the start of the run before there are fresh tokens, which are tokens scored with
    the version that sampled them; 0 where the run's spec gives the ratio."""
    importance_weight_max: Annotated[
        float,
        StepGauge(
            name="vcpo_importance_weight_max",
            help="Largest importance weight of the last step before truncation.",
            unit=Unit.WEIGHT,
            is_of_weights=True,
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Largest weight",
            unit="before truncation, log",
            label="weight",
            caption="One trajectory of a large weight can decide the whole update.",
            is_log=True,
            is_of_weights=True,
        ),
    ] = 0.0
    """Largest weight of a trajectory, at most the largest float; 0 when a weight has no value."""
    learning_rate_scale: Annotated[
        float,
        StepGauge(
            name="vcpo_learning_rate_scale_ratio",
            help="Factor of ESS or trust region on the learning rate of the last step that made an"
            " update.",
            is_of_update=True,
        ),
        StepSignal(is_of_update=True),
    ] = 0.0
    """0 when the step was skipped."""
    learning_rate: Annotated[
        float,
        StepGauge(
            name="vcpo_learning_rate",
            help="Learning rate of the last step that made an update, with warm-up, schedule,"
            " backoff and scale.",
            unit=Unit.RATE,
            is_of_update=True,
        ),
        StepSignal(is_of_update=True),
    ] = 0.0
    """Rate of the step: the spec's rate times schedule, scale and backoff. 0 when it was
    skipped."""
    learning_rate_schedule: Annotated[
        float,
        StepGauge(
            name="vcpo_learning_rate_schedule_ratio",
            help="Factor of warm-up and schedule on the learning rate of the last step that made an"
            " update.",
            is_of_update=True,
        ),
        StepSignal(is_of_update=True),
    ] = 1.0
    learning_rate_backoff: Annotated[
        float,
        StepGauge(
            name="vcpo_learning_rate_backoff_ratio",
            help="Factor of early warnings and rollbacks on the learning rate of the last step that"
            " made an update.",
            is_of_update=True,
        ),
        StepSignal(is_of_update=True),
    ] = 1.0
    """Factor that warnings and rollbacks before the step have left."""
    gradient_norm: Annotated[
        float,
        StepGauge(
            name="vcpo_gradient_norm",
            help="L2 norm, before clipping, of the gradient of the last step that made an update.",
            unit=Unit.NORM,
            is_of_update=True,
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            is_of_update=True,
            title="Gradient norm",
            unit="before clipping",
            label="norm",
            caption="Spikes together with a low ESS ratio come from a few heavy weights.",
        ),
    ] = 0.0
    """0 when there is no gradient, or no finite one."""
    baseline_shift: Annotated[
        float,
        StepGauge(
            name="vcpo_baseline_shift",
            help="Mean over trajectories of the baseline minus the mean reward of its group.",
            unit=Unit.REWARD,
            is_of_weights=True,
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Baseline shift",
            unit="reward",
            label="shift",
            caption="Distance of the baseline from its group's mean reward; 0 is no correction.",
            is_signed=True,
            is_of_weights=True,
        ),
    ] = 0.0
    masked_share: Annotated[
        float,
        StepGauge(
            name="vcpo_masked_tokens_ratio",
            help="Share of the last step's tokens that the method gives no gradient.",
            is_of_weights=True,
        ),
    ] = 0.0
    warning_level: Annotated[str, StepSignal()] = "ok"
    """Early warning of a collapse, judged by the last steps: ok, warn, critical or dead."""
    warning_score: Annotated[
        float,
        StepGauge(
            name="vcpo_collapse_warning_ratio",
            help="Early warning of a collapse: 1/3 warns, 2/3 is critical, 1 is dead.",
        ),
        StepSignal(),
    ] = 0.0
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls of attention without masks on rank 0, by way: `kernel` takes all trajectories of a row
    at once, `one_by_one` does not, `rows` have one trajectory each. Empty where the model has its
    own attention."""
    diagnostics: Annotated[
        Mapping[str, Any],
        StepGauge(
            entry="token_ess_ratio",
            name="vcpo_token_ess_ratio",
            help="ESS ratio of the last step's tokens, untruncated.",
        ),
        StepGauge(
            entry="truncated_ess_ratio",
            name="vcpo_truncated_ess_ratio",
            help="ESS ratio of the last step's trajectories after truncation.",
        ),
        StepGauge(
            entry="kl_per_token",
            name="vcpo_divergence_nats",
            help="KL divergence from behavior to target policy in the last step, per token.",
        ),
        StepGauge(
            entry="weight_concentration",
            name="vcpo_weight_concentration_ratio",
            help="Largest importance weight of the last step's trajectories over their sum.",
        ),
        StepGauge(
            entry="baseline_weight_concentration",
            name="vcpo_baseline_weight_concentration_ratio",
            help="Largest weight of a reward in the baseline over a group's sum, mean over groups.",
        ),
        StepGauge(
            entry="top_gradient_share",
            name="vcpo_top_gradient_ratio",
            help="Share of the last step's gradient norm that the top 1 % of trajectories have.",
        ),
        StepGauge(
            entry="advantage_p05",
            name="vcpo_advantage_p05",
            help="Fifth percentile of the advantages of the last step's trajectories.",
            unit=Unit.REWARD,
        ),
        StepGauge(
            entry="advantage_p95",
            name="vcpo_advantage_p95",
            help="95th percentile of the advantages of the last step's trajectories.",
            unit=Unit.REWARD,
        ),
        StepChart(
            topic=ChartTopic.OFF_POLICY,
            entry="token_ess_ratio",
            title="Token ESS ratio",
            unit="effective share of the tokens",
            label="token ESS",
            caption="Speaks where responses are so long that the ESS ratio of trajectories is low.",
        ),
        StepChart(
            topic=ChartTopic.OFF_POLICY,
            entry="kl_per_token",
            title="Divergence",
            unit="KL, nats per token, log",
            label="KL",
            caption="Distance of the learner from the policy that sampled the batch.",
            is_log=True,
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="weight_concentration",
            title="Weight concentration",
            unit="largest weight over their sum",
            label="concentration",
            caption="At 1 one trajectory is the whole batch.",
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="baseline_weight_concentration",
            title="Baseline concentration",
            unit="largest OPOB weight over their sum",
            label="concentration",
            caption="At 1 one trajectory is the whole baseline of its group.",
        ),
        StepChart(
            topic=ChartTopic.UPDATE,
            entry="top_gradient_share",
            title="Top gradient share",
            unit="share of the gradient norm",
            label="top 1 %",
            caption="Part of the update that comes from the top 1 % of the trajectories.",
            is_of_update=True,
        ),
    ] = field(default_factory=dict)
    """`vcpo.algo.BatchDiagnostics` by field; empty when a weight has no value."""
    ess_by_lag: Mapping[str, float] = field(default_factory=dict)
    """ESS ratio of the trajectories in each bucket of lags, by the bucket's smallest lag; empty
    when a weight has no value."""
    skipped: str | None = None
    """Why no update was made, or None."""

    @property
    def has_weights(self) -> bool:
        """Whether every importance weight has a value; no batch has an ESS ratio of 0."""
        return self.ess_ratio > 0.0

    @property
    def effective_rate(self) -> EffectiveRate | None:
        """Learning rate of the step and its factors; None when it was skipped."""
        if self.skipped is not None:
            return None
        return EffectiveRate(
            rate=self.learning_rate,
            schedule=self.learning_rate_schedule,
            scale=self.learning_rate_scale,
            backoff=self.learning_rate_backoff,
        )

    @property
    def relative_ess_ratio(self) -> float | None:
        """ESS ratio over the on-policy one, >= 0; None when a weight has no value."""
        return self.ess_ratio / self.on_policy_ess_ratio if self.has_weights else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(UpdateRecord):
    """One optimizer step: its update, and the state of the run around it."""

    step: int
    """Number of the step, from 1; also the policy version that it published."""
    time_unix_s: float
    lag_mean: Annotated[float, StepSignal()]
    """Mean age of the trained tokens, in policy versions."""
    lag_p50: Annotated[int, StepSignal()]
    lag_max: Annotated[int, StepSignal()]
    cut_responses_ratio: Annotated[
        float,
        StepGauge(
            name="vcpo_cut_responses_ratio",
            help="Share of the last step's responses that reached the largest length.",
        ),
        StepSignal(),
        StepChart(
            topic=ChartTopic.SPEED,
            title="Cut responses",
            unit="share at sampling.maxNewTokens",
            label="cut",
            caption="A response that is cut before its answer is judged without it.",
        ),
    ] = 0.0
    """Share of the batch's responses that reached the largest number of new tokens, in [0, 1]."""
    equal_groups_ratio: Annotated[
        float,
        StepGauge(
            name="vcpo_equal_groups_ratio",
            help="Share of the last step's groups whose rewards are equal, which teach nothing.",
        ),
        StepSignal(),
        StepChart(
            topic=ChartTopic.UPDATE,
            title="Groups that teach nothing",
            unit="share whose rewards are equal",
            label="equal",
            caption="Their responses have no gradient; at 1 the step is skipped.",
        ),
    ] = 0.0
    """Share of the batch's groups whose rewards are all equal, in [0, 1]; groups that dynamic
    sampling dropped are not in the batch."""
    prompt_tokens_mean: Annotated[
        float,
        StepSignal(),
        StepChart(
            topic=ChartTopic.SPEED,
            title="Prompt length",
            unit="tokens, mean",
            label="tokens",
            caption="With its template. Prompt and response share the model's context.",
        ),
    ] = 0.0
    """Mean length of the batch's prompts, with their template, in tokens."""
    prompt_tokens_max: int = 0
    """Length of the longest of them."""
    response_tokens_p05: Annotated[
        int,
        StepGauge(
            name="vcpo_response_tokens_p05",
            help="Fifth percentile of the lengths of the last step's responses.",
            unit=Unit.TOKENS,
        ),
    ] = 0
    response_tokens_p50: Annotated[
        int,
        StepGauge(
            name="vcpo_response_tokens_p50",
            help="Median of the lengths of the last step's responses.",
            unit=Unit.TOKENS,
        ),
    ] = 0
    response_tokens_p95: Annotated[
        int,
        StepGauge(
            name="vcpo_response_tokens_p95",
            help="95th percentile of the lengths of the last step's responses.",
            unit=Unit.TOKENS,
        ),
    ] = 0
    """Sampled tokens that 5 %, half and 95 % of the batch's responses stay below."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the batch's rewards, by name; a response without a part has 0 of it."""
    step_s: float
    """Seconds spent computing the update."""
    idle_s: float
    """Seconds spent waiting for the batch before it."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `step_s` by stage of the update: `score`, `backward`, `optimizer`."""
    step_interval_s: Annotated[
        float,
        StepGauge(
            name="vcpo_learner_step_interval_seconds",
            help="Mean time of a step with the wait before it, over the last ten steps.",
        ),
    ] = 0.0
    """What a step usually takes; alerts count in it."""
    tokens_per_s: Annotated[
        float,
        StepGauge(
            name="vcpo_learner_tokens_per_second",
            help="Response tokens that the learner accepted per second, over the last ten steps.",
            unit=Unit.TOKENS,
        ),
        StepChart(
            topic=ChartTopic.SPEED,
            title="Throughput",
            unit="tokens per second",
            label="tokens/s",
            caption="Response tokens accepted by the learner.",
        ),
    ]
    """Response tokens accepted per second, over the window of recent steps."""
    lag_limit_steps: int
    """Lag limit in force when the batch was taken; no token of it is older."""
    workers: Annotated[
        int,
        StepChart(
            topic=ChartTopic.SPEED,
            title="Rollout workers",
            unit="heard of lately",
            label="workers",
            caption="The curve falls when workers are lost or removed.",
            is_noisy=False,
            is_whole=True,
        ),
    ]
    """Workers that called the learner lately."""
    leased: int
    """Trajectories leased so far; `in_flight`, `buffered`, `consumed` and `dropped` sum to it."""
    in_flight: int
    buffered: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Trajectories dropped so far, by reason."""
    critical_steps: Annotated[
        int,
        StepGauge(
            name="vcpo_critical_steps_in_a_row",
            help="Steps in a row after which the early warning was critical or dead.",
            unit=Unit.STEPS,
        ),
    ] = 0
    collapsed_steps: Annotated[
        int,
        StepGauge(
            name="vcpo_collapsed_steps_in_a_row",
            help="Steps in a row with the reward below half of its best, beyond chance.",
            unit=Unit.STEPS,
        ),
    ] = 0
    """By the mean reward of ten steps; a rollback ends it."""
    throttled_steps: Annotated[
        int,
        StepGauge(
            name="vcpo_throttled_steps_in_a_row",
            help="Steps in a row with a lag limit below the spec's that did not rise.",
            unit=Unit.STEPS,
        ),
    ] = 0
    unsaved_steps: Annotated[
        int,
        StepGauge(
            name="vcpo_learner_unsaved_steps",
            help="Steps since the newest checkpoint, or since the start of the run.",
        ),
    ] = 0
    rollbacks: Annotated[
        int,
        StepGauge(
            name="vcpo_learner_rollbacks",
            help="Rollbacks of the run to a good checkpoint so far.",
        ),
        StepSignal(),
    ] = 0
    """Rollbacks so far; one after this step counts."""
    mismatch: Annotated[
        Mapping[str, Any],
        StepGauge(
            entry="gap_nats",
            name="vcpo_mismatch_nats",
            help="Mean absolute log pi - log mu of fresh tokens, of the median worker.",
        ),
        StepGauge(
            entry="gap_p99_nats",
            name="vcpo_mismatch_p99_nats",
            help="99th percentile of absolute log pi - log mu of fresh tokens, median worker.",
        ),
        StepGauge(
            entry="divergence_nats",
            name="vcpo_mismatch_divergence_nats",
            help="KL divergence from worker to learner at equal version, per token, of the median"
            " worker.",
        ),
        StepGauge(
            entry="limit_nats",
            name="vcpo_mismatch_limit_nats",
            help="Largest mean absolute log pi - log mu that is expected or that the spec allows.",
        ),
        StepGauge(
            entry="worst_gap_nats",
            name="vcpo_mismatch_worst_worker_nats",
            help="Mean absolute log pi - log mu of fresh tokens of the worker that has most of it.",
        ),
        StepGauge(
            entry="is_exceeded",
            name="vcpo_mismatch_exceeded",
            help="1 while the median worker differs from the learner by more than is expected.",
            unit=Unit.FLAG,
        ),
    ] = field(default_factory=dict)
    """Fresh tokens, of the newest blocks of every worker: `gap_nats`, `gap_p99_nats`,
    `divergence_nats` and `scale_error` of the median worker, `worst_gap_nats`, `limit_nats`, gaps
    `by_worker` (the largest), `by_engine` and `by_position` (by the first position of a bin), and
    the `cause` of what exceeds a limit; `is_exceeded` is 1 if the median worker does.
    Empty before there are enough."""
    learner_peak_gibibytes: Annotated[
        float,
        StepChart(
            topic=ChartTopic.SPEED,
            title="Memory of the learner",
            unit="GiB resident at most, rank 0",
            label="GiB",
            caption="It grows where a step or a checkpoint needs more than all before it.",
            is_noisy=False,
        ),
    ] = 0.0
    """Most memory that the process of rank 0 has had resident since its start."""
    worker_peak_gibibytes: Annotated[
        float,
        StepChart(
            topic=ChartTopic.SPEED,
            title="Memory of a worker",
            unit="GiB resident at most, the largest worker",
            label="GiB",
            caption="Of the worker's process; the processes of engine vllm are not in it.",
            is_noisy=False,
        ),
    ] = 0.0
    """Most memory that a worker's process has had resident since its start; of the largest
    worker."""
    mfu: Annotated[
        float | None,
        StepGauge(
            name="vcpo_learner_mfu_ratio",
            help="Arithmetic that the last step's tokens need over the peak of the learner's GPUs.",
        ),
        StepChart(
            topic=ChartTopic.SPEED,
            title="MFU",
            unit="share of the GPUs' peak",
            label="MFU",
            caption="6 x parameters x response tokens over the step's time, its wait included.",
        ),
    ] = None
    """Share of what the learner's GPUs could compute in the step and the wait before it; None
    without a GPU whose peak is known."""
    learner_gpu_tokens_per_s: Annotated[
        float | None,
        StepGauge(
            name="vcpo_learner_gpu_tokens_per_second",
            help="Response tokens that the last step trained per second and GPU of the learner.",
            unit=Unit.TOKENS,
        ),
    ] = None
    """Response tokens of the batch, over the seconds of the step with its wait and over the
    learner's GPUs; None without one."""
    worker_gpu_tokens_per_s: Annotated[
        float | None,
        StepGauge(
            name="vcpo_worker_gpu_tokens_per_second",
            help="Response tokens that the learner accepted per second and GPU of the workers.",
            unit=Unit.TOKENS,
        ),
    ] = None
    """`tokens_per_s` over the GPUs that the workers heard of ask for; None if they ask for none."""
    gpu_s: Annotated[
        float | None,
        StepGauge(
            name="vcpo_gpu_seconds",
            help="Time of the GPUs of learner and workers so far, in steps and waits before them.",
        ),
    ] = None
    """GPUs of the learner, and those that the workers heard of ask for, times the seconds of the
    steps so far; steps that were undone do not count. None without a GPU."""
    ranks: int = 1
    """Processes of the learner that took the step together."""
    weight_updates_in_flight: int = 0
    """Policy versions that workers have swapped in so far while they generated sequences."""
    adapter_swaps: int = 0
    """Policy versions so far whose LoRA adapters the workers' engines serve beside a base model."""
    merged_versions: int = 0
    """Policy versions so far whose LoRA adapters workers merged into full sets of weights."""


def rate_fields(rate: EffectiveRate) -> dict[str, Any]:
    """Return the fields of a record that hold a rate."""
    return {
        "learning_rate": rate.rate,
        "learning_rate_schedule": rate.schedule,
        "learning_rate_scale": rate.scale,
        "learning_rate_backoff": rate.backoff,
    }


def update_fields(update: UpdateRecord) -> dict[str, Any]:
    """Return the fields of `UpdateRecord` by name, of it or of a record that holds more."""
    return {each.name: getattr(update, each.name) for each in dataclasses.fields(UpdateRecord)}


def gauge_value(record: UpdateRecord, field_name: str, gauge: StepGauge) -> float | None:
    """Return what a gauge shows of a record; None when the record has no such number."""
    if gauge.is_of_weights and not record.has_weights:
        return None
    return _number(record, field_name, gauge.entry)


def chart_value(record: UpdateRecord, field_name: str, chart: StepChart) -> float | None:
    """Return what a chart shows of a record; None is a gap."""
    if chart.is_of_update and record.skipped is not None:
        return None
    if chart.is_of_weights and not record.has_weights:
        return None
    value = _number(record, field_name, chart.entry)
    return None if value is None or (chart.is_log and value <= 0.0) else value


def _number(record: UpdateRecord, field_name: str, entry: str | None) -> float | None:
    found = getattr(record, field_name)
    value: float | None = found if entry is None else found.get(entry)
    return value


_Use = TypeVar("_Use", StepGauge, StepChart, StepSignal)


def _annotated_fields(use: type[_Use]) -> tuple[tuple[str, _Use], ...]:
    """Return each field of a step record that is annotated with a use, in order of the fields."""
    hints = get_type_hints(StepRecord, include_extras=True)
    return tuple(
        (name, note)
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, use)
    )


GAUGES: Final = _annotated_fields(StepGauge)
"""Name of the field and the gauge that shows it."""
CHARTS: Final = _annotated_fields(StepChart)
"""Name of the field and the chart that draws it or an entry of it."""
SIGNALS: Final = _annotated_fields(StepSignal)
"""Name of the field and how signals carry it."""
