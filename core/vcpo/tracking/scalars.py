"""The numbers of a run by the names that tracking services show.

A name is that of the record's field, after the group in which services show it together:
`off_policy/ess_ratio`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import StepRecord

_GROUPS: Final = {
    "task": (
        "reward_mean reward_window_mean reward_window_error response_tokens_mean surprisal_nats"
        " cut_responses_ratio equal_groups_ratio prompt_tokens_mean prompt_tokens_max"
        " response_tokens_p05 response_tokens_p50 response_tokens_p95 reward_parts"
    ),
    "learner": (
        "step learning_rate gradient_norm step_s idle_s stage_s step_interval_s tokens_per_s"
        " ranks learner_peak_gibibytes attention_calls"
    ),
    "rollout": (
        "workers worker_peak_gibibytes weight_updates_in_flight adapter_swaps merged_versions"
        " leased in_flight buffered consumed dropped"
    ),
}
_GROUP_OF: Final = {name: group for group, names in _GROUPS.items() for name in names.split()}
_OF_WEIGHTS: Final = frozenset({"ess_ratio", "importance_weight_max", "baseline_shift"})
"""Fields that a step has only if every importance weight has a value."""
_ODD: Final = re.compile(r"[^\w.\- ]", re.ASCII)
"""Characters that a part of a name may not have, since not every service takes them."""
LAST_NAME: Final = "learner/step_skipped"
"""Name of the last number of a step: who has it of a step has all numbers of the step."""


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, without those that this step does not have.

    `LAST_NAME` comes last.
    """
    missing = {"time_unix_s"}
    if record.skipped is not None:
        missing |= {"gradient_norm", "learning_rate", "learning_rate_schedule"}
        missing |= {"learning_rate_scale", "learning_rate_backoff"}
    if not record.has_weights:
        missing |= _OF_WEIGHTS
    shown: dict[str, float] = {}
    for each in dataclasses.fields(record):
        if each.name not in missing:
            name = f"{_GROUP_OF.get(each.name, 'off_policy')}/{each.name}"
            shown |= _numbers(name, getattr(record, each.name))
    if record.relative_ess_ratio is not None:
        shown["off_policy/relative_ess_ratio"] = record.relative_ess_ratio
    shown[LAST_NAME] = float(record.skipped is not None)
    return shown


def _numbers(name: str, value: object) -> dict[str, float]:
    """Return a number, or those of a mapping and of the mappings in it; words are left out."""
    if isinstance(value, int | float):
        return {name: float(value)}
    found: dict[str, float] = {}
    if isinstance(value, Mapping):
        for key, each in value.items():
            found |= _numbers(f"{name}/{_ODD.sub('_', str(key))}", each)
    return found


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation by name."""
    return {"evaluation/evaluation_accuracy": record.accuracy}
