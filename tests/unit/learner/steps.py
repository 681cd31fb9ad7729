"""Records of steps and evaluations, complete but for what a test says."""

from typing import Any

from vcpo.journal import EvaluationRecord, StepRecord


def stepped(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": 1,
        "time_unix_s": 0.0,
        "reward_mean": 0.5,
        "ess_ratio": 0.5,
        "on_policy_ess_ratio": 1.0,
        "learning_rate_scale": 0.7,
        "learning_rate": 7e-7,
        "gradient_norm": 1.0,
        "importance_weight_max": 2.0,
        "lag_mean": 0.0,
        "lag_p50": 0,
        "lag_max": 0,
        "response_tokens_mean": 3.0,
        "step_s": 1.0,
        "idle_s": 0.0,
        "tokens_per_s": 10.0,
        "admission_lag_steps": 1,
        "workers": 1,
        "leased": 4,
        "in_flight": 0,
        "buffered": 0,
        "consumed": 4,
    }
    return StepRecord(**{**values, **changes})


def evaluated(**changes: Any) -> EvaluationRecord:
    values: dict[str, Any] = {
        "step": 0,
        "time_unix_s": 0.0,
        "accuracy": 0.5,
        "num_trajectories": 1,
        "policy_version_min": 0,
        "policy_version_max": 0,
    }
    return EvaluationRecord(**{**values, **changes})
