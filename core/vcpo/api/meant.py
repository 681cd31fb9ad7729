"""The field that a user may have meant: spelled alike, or called otherwise by TRL and verl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

from vcpo.api.run import json_schema

_ELSEWHERE: Final = {
    "batch.promptsPerStep": "train_batch_size per_device_train_batch_size",
    "batch.trajectoriesPerPrompt": "num_generations rollout_n group_size n",
    "sampling.maxNewTokens": "max_completion_length max_response_length max_new_tokens max_tokens",
    "optimizer.learningRate": "lr",
    "optimizer.maxGradientNorm": "max_grad_norm grad_clip",
    "steps": "max_steps total_training_steps",
    "model.name": "model_name_or_path model_path path",
    "model.lora": "peft_config lora_rank lora_alpha",
    "environment.parameters": "train_dataset train_files dataset_name",
    "environment.rewards": "reward_funcs reward_function",
    "algorithm.method": "loss_type adv_estimator",
    "algorithm.settings": "beta epsilon epsilon_high clip_ratio",
    "algorithm.maxPolicyLagSteps": "num_iterations steps_per_generation staleness_threshold",
    "evaluation.everySteps": "eval_steps test_freq",
    "checkpoint.everySteps": "save_steps save_freq",
    "tracking.sinks": "report_to logger",
}
"""Names of TRL and verl, by field."""


def meant(path: str) -> str:
    """Return the path of the field that an unknown one may stand for; empty if none is alike."""
    section, _, last = re.sub(r"\[\d+\]", "[0]", path).rpartition(".")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()
    for field, names in _ELSEWHERE.items():
        if name in names.split():
            return f"spec.{field}"
    by_name = {}
    for field in sorted(_fields(), key=lambda each: each.rpartition(".")[0] == section):
        by_name[field.rpartition(".")[2]] = field  # one of the same section comes last, and stays
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    close = get_close_matches(camel, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else ""


@cache
def _fields() -> tuple[str, ...]:
    schema = json_schema()
    return tuple(_below(schema, schema, ""))


def _below(schema: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[str]:
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for name, field in node.get("properties", {}).items():
        yield (inner := f"{path}.{name}" if path else name)
        yield from _below(schema, field, inner)
    for choice in (*node.get("anyOf", ()), *node.get("allOf", ())):
        yield from _below(schema, choice, path)
    if isinstance(items := node.get("items"), dict):
        yield from _below(schema, items, f"{path}[0]")
