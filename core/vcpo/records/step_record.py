"""The record of one optimizer step, which everything that shows a run reads.

A number of a step is added here, as a field, and computed in the update or in the training loop.
The journal (`metrics.jsonl`), the learner's signals and the trackers hold every field under its own
name. A field that is declared by `shown` or `entries_shown` is a metric of the learner too, which
holds the last step's value. Numbers are finite; mappings hold plain JSON values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Final

from vcpo.records.effective_rate import EffectiveRate


@dataclass(frozen=True, slots=True)
class StepGauge:
    """The metric that holds a number of the last step."""

    name: str
    help: str
    """One sentence: what it measures, and its unit where the name does not say it."""
    is_of_update: bool = False
    """Whether a skipped step leaves the value as it is."""
    is_of_weights: bool = False
    """Whether only steps whose importance weights all have a value have it."""


def shown(name: str, text: str, *, default: Any = MISSING, **options: bool) -> Any:
    """Declare a field whose value a metric shows; options: flags of `StepGauge`."""
    return field(default=default, metadata={"gauge": StepGauge(name, text, **options)})


def entries_shown(**gauges: tuple[str, str]) -> Any:
    """Declare a mapping of which metrics show some entries: name and help by key."""
    shown_entries = {key: StepGauge(*each) for key, each in gauges.items()}
    return field(default_factory=dict, metadata={"entries": shown_entries})


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one update did."""

    reward_mean: float = shown("vcpo_reward_mean", "Mean reward of the last step's trajectories.")
    reward_window_mean: float | None = None
    """Mean reward of the last ten steps, which few rewards cannot bend, as collapses are judged by;
    None before there are ten."""
    reward_window_error: float = 0.0
    """Standard error of that mean."""
    response_tokens_mean: float
    """Mean length of the batch's responses, in tokens."""
    surprisal_nats: float | None = None
    """Mean of -log mu over the batch's sampled tokens, with mu as sampled from, temperature
    included; estimates the behavior policy's entropy. None when one has no value."""
    ess_ratio: float = shown(
        "vcpo_ess_ratio",
        "Effective sample size of the last step's batch over its size, untruncated.",
        default=0.0,
        is_of_weights=True,
    )
    """In [1/B, 1], read at `ess_kind`; 0 when a weight has no value."""
    on_policy_ess_ratio: float = shown(
        "vcpo_on_policy_ess_ratio",
        "ESS ratio at lag 0, given or calibrated; ESS is measured against it.",
    )
    """In (0, 1]."""
    ess_kind: str = "sequence"
    """Length at which both ESS ratios are read: whole trajectories, blocks or tokens."""
    calibration_age_steps: int = shown(
        "vcpo_calibration_age_steps",
        "Optimizer steps since the on-policy ESS ratio was last measured on fresh tokens.",
        default=0,
    )
    """Counts from the start of the run before there are fresh tokens, which are tokens scored with
    the version that sampled them; 0 where the run's spec gives the ratio."""
    importance_weight_max: float = shown(
        "vcpo_importance_weight_max",
        "Largest importance weight of the last step before truncation.",
        default=0.0,
        is_of_weights=True,
    )
    """Largest weight of a trajectory, at most the largest float; 0 when a weight has no value."""
    learning_rate_scale: float = shown(
        "vcpo_learning_rate_scale_ratio",
        "Factor of ESS or trust region on the learning rate of the last step that made an update.",
        default=0.0,
        is_of_update=True,
    )
    """0 when the step was skipped."""
    learning_rate: float = shown(
        "vcpo_learning_rate",
        "Learning rate of the last step that made an update, with warm-up, schedule, backoff and"
        " scale.",
        default=0.0,
        is_of_update=True,
    )
    """The spec's rate times schedule, scale and backoff; 0 when the step was skipped."""
    learning_rate_schedule: float = shown(
        "vcpo_learning_rate_schedule_ratio",
        "Factor of warm-up and schedule on the learning rate of the last step that made an update.",
        default=1.0,
        is_of_update=True,
    )
    learning_rate_backoff: float = shown(
        "vcpo_learning_rate_backoff_ratio",
        "Factor of early warnings and rollbacks on the learning rate of the last step that made an"
        " update.",
        default=1.0,
        is_of_update=True,
    )
    """Factor that warnings and rollbacks before the step have left."""
    gradient_norm: float = shown(
        "vcpo_gradient_norm",
        "L2 norm, before clipping, of the gradient of the last step that made an update.",
        default=0.0,
        is_of_update=True,
    )
    """0 when there is no gradient, or no finite one."""
    baseline_shift: float = 0.0
    """Mean over trajectories of the baseline minus the mean reward of its group."""
    masked_share: float = 0.0
    """Share of the tokens that the method gives no gradient, in [0, 1]."""
    warning_level: str = "ok"
    """Early warning of a collapse, judged by the last steps: ok, warn, critical or dead."""
    warning_score: float = shown(
        "vcpo_collapse_warning_ratio",
        "Early warning of a collapse: 1/3 warns, 2/3 is critical, 1 is dead.",
        default=0.0,
    )
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls of attention without masks on rank 0, by way: `kernel` takes all trajectories of a row
    at once, `one_by_one` does not, `rows` have one trajectory each. Empty where the model has its
    own attention."""
    diagnostics: Mapping[str, Any] = entries_shown(
        token_ess_ratio=(
            "vcpo_token_ess_ratio",
            "ESS ratio of the last step's tokens, untruncated.",
        ),
        kl_per_token=(
            "vcpo_divergence_nats",
            "KL divergence from behavior to target policy in the last step, per token.",
        ),
    )
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
    lag_mean: float
    """Mean age of the trained tokens, in policy versions."""
    lag_p50: int = shown(
        "vcpo_token_lag_median_steps", "Median age of the last step's tokens, in policy versions."
    )
    lag_max: int = shown(
        "vcpo_token_lag_max_steps", "Largest age of a token of the last step, in policy versions."
    )
    cut_responses_ratio: float = shown(
        "vcpo_cut_responses_ratio",
        "Share of the last step's responses that reached the largest length.",
        default=0.0,
    )
    """Of those that reached the largest number of new tokens, in [0, 1]."""
    equal_groups_ratio: float = shown(
        "vcpo_equal_groups_ratio",
        "Share of the last step's groups whose rewards are equal, which teach nothing.",
        default=0.0,
    )
    """In [0, 1]; groups that dynamic sampling dropped are not in the batch."""
    prompt_tokens_mean: float = 0.0
    """Mean length of the batch's prompts, with their template, in tokens."""
    prompt_tokens_max: int = 0
    """Length of the longest of them."""
    response_tokens_p05: int = 0
    response_tokens_p50: int = 0
    response_tokens_p95: int = 0
    """Sampled tokens that 5 %, half and 95 % of the batch's responses stay below."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the batch's rewards, by name; a response without a part has 0 of it."""
    step_s: float
    """Seconds spent computing the update."""
    idle_s: float
    """Seconds spent waiting for the batch before it."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `step_s` by stage of the update: `score`, `backward`, `optimizer`."""
    step_interval_s: float = shown(
        "vcpo_learner_step_interval_seconds",
        "Mean time of a step with the wait before it, over the last ten steps.",
        default=0.0,
    )
    """What a step usually takes; alerts count in it."""
    tokens_per_s: float = shown(
        "vcpo_learner_tokens_per_second",
        "Response tokens that the learner accepted per second, over the last ten steps.",
    )
    lag_limit_steps: int
    """Lag limit in force when the batch was taken; no token of it is older."""
    workers: int
    """Workers that called the learner lately."""
    leased: int
    """Trajectories leased so far; `in_flight`, `buffered`, `consumed` and `dropped` sum to it."""
    in_flight: int
    buffered: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Trajectories dropped so far, by reason."""
    critical_steps: int = shown(
        "vcpo_critical_steps_in_a_row",
        "Steps in a row after which the early warning was critical or dead.",
        default=0,
    )
    collapsed_steps: int = shown(
        "vcpo_collapsed_steps_in_a_row",
        "Steps in a row with the reward below half of its best, beyond chance.",
        default=0,
    )
    """By the mean reward of ten steps; a rollback ends it."""
    throttled_steps: int = shown(
        "vcpo_throttled_steps_in_a_row",
        "Steps in a row with a lag limit below the spec's that did not rise.",
        default=0,
    )
    unsaved_steps: int = shown(
        "vcpo_learner_unsaved_steps",
        "Steps since the newest checkpoint, or since the start of the run.",
        default=0,
    )
    rollbacks: int = shown(
        "vcpo_learner_rollbacks", "Rollbacks of the run to a good checkpoint so far.", default=0
    )
    """One after this step counts."""
    mismatch: Mapping[str, Any] = entries_shown(
        gap_nats=(
            "vcpo_mismatch_nats",
            "Mean absolute log pi - log mu of fresh tokens, of the median worker.",
        ),
        limit_nats=(
            "vcpo_mismatch_limit_nats",
            "Largest mean absolute log pi - log mu that is expected or that the spec allows.",
        ),
        worst_gap_nats=(
            "vcpo_mismatch_worst_worker_nats",
            "Mean absolute log pi - log mu of fresh tokens of the worker that has most of it.",
        ),
        is_exceeded=(
            "vcpo_mismatch_exceeded",
            "1 while the median worker differs from the learner by more than is expected.",
        ),
    )
    """Fresh tokens, of the newest blocks of every worker: `gap_nats`, `gap_p99_nats`,
    `divergence_nats` and `scale_error` of the median worker, `worst_gap_nats`, `limit_nats`, gaps
    `by_worker` (the largest), `by_engine` and `by_position` (by the first position of a bin), and
    the `cause` of what exceeds a limit; `is_exceeded` is 1 if the median worker does.
    Empty before there are enough."""
    learner_peak_gibibytes: float = 0.0
    """Most memory that the process of rank 0 has had resident since its start."""
    worker_peak_gibibytes: float = 0.0
    """Most memory that a worker's process has had resident since its start; of the largest
    worker."""
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


def _gauges() -> Iterator[tuple[str, str, StepGauge]]:
    for each in dataclasses.fields(StepRecord):
        if "gauge" in each.metadata:
            yield each.name, "", each.metadata["gauge"]
        for key, gauge in each.metadata.get("entries", {}).items():
            yield each.name, key, gauge


GAUGES: Final = tuple(_gauges())
"""The metrics of a step: name of the field, key of the entry or an empty text, and the gauge."""


def gauge_values(record: StepRecord) -> Iterator[tuple[StepGauge, float | None]]:
    """Yield the metrics of a record and their values; None: the step has no such number.

    A metric that the step leaves as it is is not yielded.
    """
    for name, key, gauge in GAUGES:
        if gauge.is_of_update and record.skipped is not None:
            continue
        found = getattr(record, name)
        is_missing = gauge.is_of_weights and not record.has_weights
        yield gauge, None if is_missing else found.get(key) if key else found
