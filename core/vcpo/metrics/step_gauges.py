"""The numbers of a step that are metrics, and the record of a step that metrics hold."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Final

from vcpo.records.step_record import StepRecord, checked_record


@dataclass(frozen=True, slots=True)
class StepGauge:
    """The metric that holds a number of the last step."""

    field: str
    """Of the record."""
    name: str
    """Of the metric."""
    help: str
    """One sentence: what it measures, and its unit where the name does not say it."""
    key: str = ""
    """Of the number within its field, where the field is a mapping."""
    is_of_weights: bool = False
    """Whether only steps whose importance weights all have a value have it."""


GAUGES: Final = (
    StepGauge("reward_mean", "vcpo_reward_mean", "Mean reward of the last step's trajectories."),
    StepGauge(
        "ess_ratio",
        "vcpo_ess_ratio",
        "Effective sample size of the last step's batch over its size, untruncated.",
        is_of_weights=True,
    ),
    StepGauge(
        "on_policy_ess_ratio",
        "vcpo_on_policy_ess_ratio",
        "ESS ratio at lag 0, given or calibrated; ESS is measured against it.",
    ),
    StepGauge(
        "calibration_age_steps",
        "vcpo_calibration_age_steps",
        "Optimizer steps since the on-policy ESS ratio was last measured on fresh tokens.",
    ),
    StepGauge(
        "importance_weight_max",
        "vcpo_importance_weight_max",
        "Largest importance weight of the last step before truncation.",
        is_of_weights=True,
    ),
    StepGauge(
        "learning_rate_scale",
        "vcpo_learning_rate_scale_ratio",
        "Factor of ESS or trust region on the learning rate of the last step.",
    ),
    StepGauge(
        "learning_rate",
        "vcpo_learning_rate",
        "Learning rate of the last step, with warm-up, schedule, backoff and scale.",
    ),
    StepGauge(
        "learning_rate_schedule",
        "vcpo_learning_rate_schedule_ratio",
        "Factor of warm-up and schedule on the learning rate of the last step.",
    ),
    StepGauge(
        "learning_rate_backoff",
        "vcpo_learning_rate_backoff_ratio",
        "Factor of early warnings and rollbacks on the learning rate of the last step.",
    ),
    StepGauge(
        "gradient_norm",
        "vcpo_gradient_norm",
        "L2 norm, before clipping, of the gradient of the last step.",
    ),
    StepGauge(
        "warning_score",
        "vcpo_collapse_warning_ratio",
        "Early warning of a collapse: 1/3 warns, 2/3 is critical, at 1 the run is lost.",
    ),
    StepGauge(
        "diagnostics",
        "vcpo_token_ess_ratio",
        "ESS ratio of the last step's tokens, untruncated.",
        key="token_ess_ratio",
    ),
    StepGauge(
        "diagnostics",
        "vcpo_divergence_nats",
        "KL divergence from behavior to target policy in the last step, per token.",
        key="kl_per_token",
    ),
    StepGauge(
        "diagnostics",
        "vcpo_gradient_signal",
        "Squared length of the expected gradient of the last step, estimated; below 0 by chance.",
        key="gradient_signal",
    ),
    StepGauge(
        "diagnostics",
        "vcpo_gradient_noise",
        "Squared length of the noise in the gradient of the last step.",
        key="gradient_noise",
    ),
    StepGauge(
        "diagnostics",
        "vcpo_gradient_fresh_noise",
        "Squared length of the noise that fresh data would have in the gradient of the last step.",
        key="fresh_gradient_noise",
    ),
    StepGauge(
        "ess_ratio_mean", "vcpo_ess_mean_ratio", "Mean ESS ratio in a window of recent steps."
    ),
    StepGauge(
        "ess_ratio_low",
        "vcpo_ess_low_ratio",
        "Tenth percentile of the ESS ratio in a window of recent steps.",
    ),
    StepGauge(
        "lag_p50",
        "vcpo_token_lag_median_steps",
        "Median age of the last step's tokens, in policy versions.",
    ),
    StepGauge(
        "lag_max",
        "vcpo_token_lag_max_steps",
        "Largest age of a token of the last step, in policy versions.",
    ),
    StepGauge(
        "cut_responses_ratio",
        "vcpo_cut_responses_ratio",
        "Share of the last step's responses that reached the largest length.",
    ),
    StepGauge(
        "equal_groups_ratio",
        "vcpo_equal_groups_ratio",
        "Share of the last step's groups whose rewards are equal, which teach nothing.",
    ),
    StepGauge(
        "step_interval_s",
        "vcpo_learner_step_interval_seconds",
        "Mean time of a step with the wait before it, over the last ten steps.",
    ),
    StepGauge(
        "tokens_per_s",
        "vcpo_learner_tokens_per_second",
        "Response tokens that the learner accepted per second, over the last ten steps.",
    ),
    StepGauge(
        "critical_steps",
        "vcpo_critical_steps_in_a_row",
        "Steps in a row after which the early warning was critical or dead.",
    ),
    StepGauge(
        "collapsed_steps",
        "vcpo_collapsed_steps_in_a_row",
        "Steps in a row with the reward below half of its best, beyond chance.",
    ),
    StepGauge(
        "throttled_steps",
        "vcpo_throttled_steps_in_a_row",
        "Steps in a row with a lag limit below the spec's that did not rise.",
    ),
    StepGauge(
        "skipped_steps",
        "vcpo_skipped_steps_in_a_row",
        "Optimizer steps since the last one that made an update.",
    ),
    StepGauge(
        "unsaved_steps",
        "vcpo_learner_unsaved_steps",
        "Steps since the newest checkpoint, or since the start of the run.",
    ),
    StepGauge(
        "rollbacks", "vcpo_learner_rollbacks", "Rollbacks of the run to a good checkpoint so far."
    ),
    StepGauge(
        "mismatch",
        "vcpo_mismatch_nats",
        "Mean absolute log pi - log mu of fresh tokens, of the median worker.",
        key="gap_nats",
    ),
    StepGauge(
        "mismatch",
        "vcpo_mismatch_limit_nats",
        "Largest mean absolute log pi - log mu that is expected or that the spec allows.",
        key="limit_nats",
    ),
    StepGauge(
        "mismatch",
        "vcpo_mismatch_worst_worker_nats",
        "Mean absolute log pi - log mu of fresh tokens of the worker that has most of it.",
        key="worst_gap_nats",
    ),
    StepGauge(
        "mismatch",
        "vcpo_mismatch_exceeded",
        "1 while the median worker differs from the learner by more than is expected.",
        key="is_exceeded",
    ),
)
"""The numbers of a step that are metrics: those that a rule or a panel reads."""


def gauge_values(record: StepRecord) -> Iterator[tuple[StepGauge, float | None]]:
    """Yield the metrics of a record and their values; None: the step has no such number."""
    for gauge in GAUGES:
        found = getattr(record, gauge.field)
        is_missing = gauge.is_of_weights and not record.has_weights
        yield gauge, None if is_missing else found.get(gauge.key) if gauge.key else found


def record_of_metrics(values: Mapping[str, float], **fields: Any) -> StepRecord:
    """Return what metrics hold of a record: values by the name of the metric.

    Other numbers of the record are 0, the on-policy ESS ratio is 1, or they are as `fields` say.
    Raises: ValueError if a field is of another type or out of its range.
    """
    found: dict[str, Any] = {
        each.name: 0
        for each in dataclasses.fields(StepRecord)
        if each.default is MISSING and each.default_factory is MISSING
    } | {"on_policy_ess_ratio": 1.0}
    for gauge in GAUGES:
        if gauge.key:
            found.setdefault(gauge.field, {})[gauge.key] = values.get(gauge.name)
        elif gauge.name in values:
            found[gauge.field] = values[gauge.name]
    return checked_record(found | fields)
