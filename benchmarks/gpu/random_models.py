"""Qwen2 models with random parameters, of the sizes that teams train, and batches for them."""

from typing import Any, Final, NamedTuple, TypeVar

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu.setting import Setting
from benchmarks.harness.made import run_spec
from benchmarks.harness.random_llama import random_groups
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory

PAD_TOKEN_ID: Final = 0


class ModelSize(NamedTuple):
    """The shape of a model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int = 151_936
    is_tied: bool = True


QWEN_0_5B: Final = ModelSize(896, 24, 4864, heads=14, key_value_heads=2)
QWEN_1_5B: Final = ModelSize(1536, 28, 8960, heads=12, key_value_heads=2)
TINY: Final = ModelSize(64, 2, 64, heads=2, key_value_heads=1, vocabulary=256)


_Config = TypeVar("_Config", Qwen2Config, LlamaConfig)


def make_config(size: ModelSize, family: type[_Config] = Qwen2Config) -> _Config:
    """The configuration of a size, for contexts of 128k tokens."""
    return family(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        tie_word_embeddings=size.is_tied,
        max_position_embeddings=131_072,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_model(size: ModelSize, device: torch.device) -> Qwen2ForCausalLM:
    """A model with float32 parameters on the device, in evaluation mode; seeded."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(make_config(size))
    model.train(mode=False)
    return model


def make_groups(
    model: Qwen2ForCausalLM, setting: Setting, *, group_size: int, tokens: int, num_groups: int = 1
) -> list[list[Trajectory]]:
    """Groups of random trajectories whose log-probabilities are the model's own.

    tokens: of each trajectory; an eighth is prompt.
    """
    with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.is_gpu):
        return random_groups(
            model,
            num_groups=num_groups,
            group_size=group_size,
            prompt_tokens=tokens // 8,
            response_tokens=tokens - tokens // 8,
        )


def make_spec(
    setting: Setting,
    *,
    group_size: int,
    tokens: int,
    num_groups: int = 1,
    method: str = "vcpo",
    algorithm: dict[str, Any] | None = None,
    learner: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
) -> VCPORunSpec:
    """A run's settings; the rest as the arguments say.

    tokens: of each trajectory.
    """
    groups = {"promptsPerStep": num_groups, "trajectoriesPerPrompt": group_size}
    return run_spec(
        steps=1_000,
        algorithm={"method": method, **(algorithm or {})},
        batch=groups | (batch or {}),
        sampling={"maxNewTokens": tokens},
        learner={"precision": setting.precision, **(learner or {})},
    )
