"""Part of the sampler: vLLM beside the learner."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from benchmarks.gpu.random_models import (
    PAD_TOKEN_ID,
    QWEN_1_5B,
    TINY,
    make_config,
    make_model,
    make_spec,
)
from benchmarks.gpu.setting import Figures, Setting, has_vllm
from benchmarks.harness.made import trajectory
from benchmarks.model_families.families import FAMILIES
from benchmarks.model_families.sampler_side import engine_difference
from benchmarks.model_families.tiny_model import save_model
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.api.workloads import EngineName, Model, Precision, RolloutGroup
from vcpo.service.lifecycle import StartError
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.update.gradient import GradientAccumulation
from vcpo_rollout.engines.engine import EngineError

_HYBRIDS: Final = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "kimi_linear", "nemotron_h", "lfm2"),
    *("olmo_hybrid", "jamba", "zamba2", "mamba2", "mamba", "falcon_mamba"),
)
"""Families that vLLM's build for CPUs refuses, and its build for GPUs should not."""

if TYPE_CHECKING:
    from vcpo_rollout.engines.engine import Generation
    from vcpo_rollout.engines.vllm.start import VllmSettings


def sampler_against_learner(setting: Setting) -> Figures:
    """Sample with vLLM, score with the learner's own passes: the same weights, the same tokens."""
    if not has_vllm():
        yield {"skipped": "needs vLLM"}
        return
    size = setting.choose(QWEN_1_5B, TINY)
    lengths = setting.choose((512, 1024, 2048, 4096, 8192), (8, 16))
    count = setting.choose(16, 4)
    model = make_model(size, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as directory:
        make_config(size).save_pretrained(directory)
        payload = PublishedState(model).whole(Precision(setting.precision))
        settings = _settings(setting, directory, sequences=count)
        sampled = asyncio.run(_sample(settings, payload, count, lengths[-1], size.vocabulary))
    nn.Module.to(model, setting.device)
    yield {"responses": count, "tokens": lengths[-1]}
    log_ratios = _log_ratios(setting, model, sampled, lengths[-1])
    every = [value for row in log_ratios for value in row]
    yield {
        "mean_absolute_nats_per_token": sum(map(abs, every)) / len(every),
        "kl_nats_per_token": sum(math.expm1(value) - value for value in every) / len(every),
        "largest_nats": max(map(abs, every)),
    }
    sums = [list(accumulate(row)) for row in log_ratios]
    yield {
        "ess_ratio": {
            length: round(ess_ratio([row[length - 1] for row in sums]), 4) for length in lengths
        }
    }


def hybrids_against_learner(setting: Setting) -> Figures:
    """Two versions of each tiny hybrid in vLLM: mean gap to the learner, or why there is none."""
    if not has_vllm():
        yield {"skipped": "needs vLLM"}
        return
    families = {each.name: each for each in FAMILIES}
    for name in _HYBRIDS:
        family = families[name]
        sizes = {**family.sizes, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            save_model(replace(family, sizes=sizes), folder)
            try:
                found: float | str = engine_difference(
                    folder,
                    EngineName.VLLM,
                    precision=Precision.BFLOAT16,
                    maxModelLen=512,
                    engineArguments={"enforce_eager": True},
                )
            except (EngineError, StartError, ValueError) as error:
                found = str(error)[:200]
        yield {name: found}


def _log_ratios(
    setting: Setting, model: nn.Module, sampled: Sequence[Generation], tokens: int
) -> list[list[float]]:
    """Learner over sampler, nats, of each token of each response."""
    spec = make_spec(
        setting,
        group_size=len(sampled),
        tokens=tokens,
        batch={"microBatchTrajectories": setting.choose(2, 4)},
    )
    trajectories = [
        trajectory(
            number,
            _prompt(number, _vocabulary(model)),
            one.token_ids,
            one.logprobs,
            version_spans=one.version_spans,
            finish_reason=one.finish_reason,
        )
        for number, one in enumerate(sampled)
    ]
    record = GradientAccumulation(model, spec, PAD_TOKEN_ID).score_only(trajectories, 0)
    rows = torch.split(record.log_ratios, list(record.num_tokens))
    return [row.tolist() for row in rows]


async def _sample(
    settings: VllmSettings, payload: bytearray, count: int, tokens: int, vocabulary: int
) -> list[Generation]:
    """Sample `count` responses of exactly `tokens` tokens at temperature 1."""
    from vcpo_rollout.engines.engine import GenerationRequest, PolicyWeights
    from vcpo_rollout.engines.vllm.engine import VllmEngine

    engine = await asyncio.to_thread(VllmEngine.start, settings, end_token_ids=frozenset())
    try:
        await engine.swap_weights(PolicyWeights(0, payload))
        requests = [
            GenerationRequest(
                prompt_token_ids=_prompt(number, vocabulary), temperature=1.0, max_new_tokens=tokens
            )
            for number in range(count)
        ]
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


def _prompt(number: int, vocabulary: int) -> tuple[int, ...]:
    return tuple((7 * number + at) % (vocabulary - 3) + 3 for at in range(8))


def _vocabulary(model: nn.Module) -> int:
    size: int = model.get_parameter("model.embed_tokens.weight").shape[0]
    return size


def _settings(setting: Setting, directory: str, *, sequences: int) -> VllmSettings:
    from vcpo_rollout.engines.vllm.start import VllmSettings

    group = {"name": "vllm", "engine": "vllm", "precision": Precision(setting.precision)}
    cache = {"kvCacheGibibytes": setting.choose(16.0, 1 / 16), "maxConcurrentSequences": sequences}
    return VllmSettings(
        model=Model(name=directory),
        group=RolloutGroup.model_validate(group | cache),
        seed=0,
        gpu_memory_ratio=0.5,
    )
