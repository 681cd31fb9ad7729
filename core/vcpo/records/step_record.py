"""The record of one optimizer step, which everything that shows a run reads.

A number of a step is added here, as a field, and computed in the update or in the training loop.
The journal (`metrics.jsonl`), the learner's signals and the trackers hold every field under its own
name. A number that a rule or a panel reads has a row in `vcpo.metrics.step_gauges` too. Numbers are
finite; mappings hold plain JSON values.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveRate:
    """The learning rate of one step: optimizer.learningRate x schedule x scale x backoff.

    Whatever shows a run holds these four numbers, so that all show one rate.
    """

    rate: float
    schedule: float
    """Factor of warm-up and schedule, in [0, 1]."""
    scale: float
    """Factor of the ESS, or of the trust region, in [0, 1]."""
    backoff: float
    """Factor that warnings and rollbacks before the step have left, in (0, 1]."""

    @property
    def share(self) -> float:
        return self.schedule * self.scale * self.backoff

    def __str__(self) -> str:
        named = {"schedule": self.schedule, "scale": self.scale, "backoff": self.backoff}
        factors = [f"{name} x{factor:.2g}" for name, factor in named.items() if factor != 1.0]
        return f"{self.rate:.3g} ({', '.join(factors) or 'full rate'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one update did."""

    reward_mean: float
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
    ess_ratio: Share = 0.0
    """In [1/B, 1], read at `ess_kind`; 0 when a weight has no value."""
    on_policy_ess_ratio: Annotated[float, Field(gt=0.0, le=1.0)]
    ess_kind: str = "sequence"
    """Length at which both ESS ratios are read: whole trajectories, blocks or tokens."""
    calibration_age_steps: Count = 0
    """Counts from the start of the run before there are fresh tokens, which are tokens scored with
    the version that sampled them; 0 where the run's spec gives the ratio."""
    importance_weight_max: NonNegative = 0.0
    """Largest weight of a trajectory, at most the largest float; 0 when a weight has no value."""
    learning_rate_scale: Share = 0.0
    """0 when the step was skipped."""
    learning_rate: NonNegative = 0.0
    """The spec's rate times schedule, scale and backoff; 0 when the step was skipped."""
    learning_rate_schedule: Share = 1.0
    learning_rate_backoff: Share = 1.0
    """Factor that warnings and rollbacks before the step have left."""
    gradient_norm: NonNegative = 0.0
    """0 when there is no gradient, or no finite one."""
    baseline_shift: float = 0.0
    """Mean over trajectories of the baseline minus the mean reward of its group."""
    masked_share: Share = 0.0
    """Of the tokens, that the method gives no gradient."""
    warning_level: Annotated[str, Field(pattern="^(ok|warn|critical|dead)$")] = "ok"
    """Early warning of a collapse, judged by the last steps."""
    warning_score: Share = 0.0
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls of attention without masks on rank 0, by way: `kernel` takes all trajectories of a row
    at once, `one_by_one` does not, `rows` have one trajectory each. Empty where the model has its
    own attention."""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    """`vcpo.algo.BatchDiagnostics` by field; empty when a weight has no value."""
    ess_by_lag: Mapping[str, float] = field(default_factory=dict)
    """ESS ratio of the trajectories in each bucket of lags, by the bucket's smallest lag; empty
    when a weight has no value."""
    skipped: str | None = None
    """Why no update was made, or None."""

    @property
    def has_weights(self) -> bool:
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
        return self.ess_ratio / self.on_policy_ess_ratio if self.has_weights else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(UpdateRecord):
    """One optimizer step: its update, and the state of the run around it."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid")

    step: int
    """Number of the step, from 1; also the policy version that it published."""
    time_unix_s: float
    lag_mean: float
    """Mean age of the trained tokens, in policy versions."""
    ess_ratio_mean: Share | None = None
    """Mean over those of the last ten steps whose weights have a value; None without one."""
    ess_ratio_low: Share | None = None
    """Tenth percentile of them."""
    lag_p50: Count
    """Median age of the trained tokens, in policy versions."""
    lag_max: Count
    cut_responses_ratio: Share = 0.0
    """Share of the responses that reached the largest number of new tokens."""
    equal_groups_ratio: Share = 0.0
    """Share of the groups whose rewards are equal; those that dynamic sampling dropped are not in
    the batch."""
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
    step_interval_s: NonNegative = 0.0
    """Mean time of the last ten steps with their waits; alerts count in it."""
    tokens_per_s: NonNegative
    """Response tokens accepted per second over the last ten steps."""
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
    critical_steps: Count = 0
    """Steps in a row, up to this one, after which the early warning was critical or dead."""
    collapsed_steps: Count = 0
    """Steps in a row after which the reward had collapsed; a rollback ends it."""
    throttled_steps: Count = 0
    """Steps in a row with a lag limit below the spec's that did not rise."""
    skipped_steps: Count = 0
    """Steps in a row without an update."""
    unsaved_steps: Count = 0
    """Steps since the newest checkpoint."""
    rollbacks: Count = 0
    """One after this step counts."""
    mismatch: Mapping[str, Any] = field(default_factory=dict)
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


_RECORD: Final = TypeAdapter(StepRecord)


def checked_record(fields: Mapping[str, Any]) -> StepRecord:
    """Return the record of its fields.

    Raises: ValueError if a field is missing, of another type, or out of its range.
    """
    return _RECORD.validate_python(fields)


def record_to_json(record: StepRecord) -> str:
    """Return a record as one JSON object."""
    return _RECORD.dump_json(record).decode()


def record_from_json(text: str) -> StepRecord:
    """Return the record of a JSON object.

    Raises: ValueError if a field is missing, of another type, or out of its range.
    """
    return _RECORD.validate_json(text)
