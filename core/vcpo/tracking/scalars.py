"""The numbers of a run by the names that tracking services show.

A name is that of the metric without `vcpo_`, after the group in which services show it together:
`off_policy/ess_ratio`. Numbers of the record that are no metric have names by the same rules.
"""

from __future__ import annotations

import re
from typing import Final

from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import GAUGES, StepRecord, gauge_value

_PREFIX: Final = "vcpo_"
_GROUPS: Final = {
    "task": (
        "vcpo_reward_mean",
        "vcpo_surprisal_nats",
        "vcpo_cut_responses_ratio",
        "vcpo_equal_groups_ratio",
        "vcpo_response_tokens_p05",
        "vcpo_response_tokens_p50",
        "vcpo_response_tokens_p95",
    ),
    "learner": (
        "vcpo_learning_rate",
        "vcpo_gradient_norm",
        "vcpo_learner_step_interval_seconds",
        "vcpo_learner_tokens_per_second",
        "vcpo_learner_mfu_ratio",
        "vcpo_learner_gpu_tokens_per_second",
        "vcpo_worker_gpu_tokens_per_second",
        "vcpo_gpu_seconds",
    ),
}
_GROUP_OF: Final = {name: group for group, names in _GROUPS.items() for name in names}
"""Group of a metric; `off_policy` for every other one."""

_UNKNOWN_TO_MLFLOW: Final = re.compile(r"[^\w.\- ]", re.ASCII)
"""Characters that a part of a name may not have: MLflow would refuse the whole step."""

LAST_NAME: Final = "learner/step_skipped"
"""Name of the last number of a step: who has it of a step has all numbers of the step."""

_FIELDS: Final = {
    "step": "learner/learner_step",
    "response_tokens_mean": "task/response_tokens_mean",
    "prompt_tokens_mean": "task/prompt_tokens_mean",
    "prompt_tokens_max": "task/prompt_tokens_max",
    "lag_mean": "off_policy/token_lag_mean_steps",
    "lag_p50": "off_policy/token_lag_median_steps",
    "lag_max": "off_policy/token_lag_max_steps",
    "lag_limit_steps": "off_policy/admission_lag_steps",
    "step_s": "learner/learner_step_duration_seconds",
    "idle_s": "learner/learner_idle_seconds",
    "ranks": "learner/learner_ranks",
    "learner_peak_gibibytes": "learner/learner_peak_gibibytes",
    "worker_peak_gibibytes": "rollout/worker_peak_gibibytes",
    "workers": "rollout/workers",
    "weight_updates_in_flight": "rollout/rollout_weight_updates_in_flight_total",
    "adapter_swaps": "rollout/adapter_swaps_total",
    "merged_versions": "rollout/merged_versions_total",
    "leased": "rollout/trajectories_leased_total",
    "in_flight": "rollout/trajectories_in_flight",
    "buffered": "rollout/trajectories_buffered",
    "consumed": "rollout/trajectories_consumed_total",
}
"""Names of the numbers that no gauge of a step shows."""


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, without those that this step does not have.

    `LAST_NAME` comes last.
    """
    shown = {name: float(getattr(record, field)) for field, name in _FIELDS.items()}
    for field, gauge in GAUGES:
        value = gauge_value(record, field, gauge)
        is_missing = value is None or (gauge.is_of_update and record.skipped is not None)
        if value is not None and not is_missing:
            group = _GROUP_OF.get(gauge.name, "off_policy")
            shown[f"{group}/{gauge.name.removeprefix(_PREFIX)}"] = float(value)
    if record.relative_ess_ratio is not None:
        shown["off_policy/relative_ess_ratio"] = record.relative_ess_ratio
    if record.reward_window_mean is not None:
        shown["task/reward_window_mean"] = record.reward_window_mean
        shown["task/reward_window_error"] = record.reward_window_error
    parts = {_UNKNOWN_TO_MLFLOW.sub("_", part): mean for part, mean in record.reward_parts.items()}
    for name, numbers in (
        ("learner/learner_step_stage_seconds", record.stage_s),
        ("task/reward_part", parts),
        ("off_policy/lag_ess_ratio", record.ess_by_lag),
        ("off_policy/mismatch_engine_nats", record.mismatch.get("by_engine", {})),
        ("off_policy/mismatch_position_nats", record.mismatch.get("by_position", {})),
        ("rollout/trajectories_dropped_total", record.dropped),
    ):
        shown.update({f"{name}/{label}": float(number) for label, number in numbers.items()})
    shown[LAST_NAME] = float(record.skipped is not None)
    return shown


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation by name."""
    return {"evaluation/evaluation_accuracy": record.accuracy}
