"""A Llama with random parameters and a batch for it to train on, for benchmarks of an update."""

import math
from dataclasses import replace
from random import Random

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from benchmarks.harness.made import trajectory
from vcpo.wire.trajectory import Trajectory, VersionSpan

VOCABULARY = 512
PAD_TOKEN_ID = 0
_SCORED_TOKENS = 256
"""Tokens whose logits are in memory at a time while a batch is made."""


def random_model(
    hidden_size: int,
    *,
    max_tokens: int,
    vocabulary: int = VOCABULARY,
    num_layers: int = 3,
    is_hybrid: bool = False,
) -> PreTrainedModel:
    """A Llama with attention heads of 32 and an output head of its own, seeded.

    hidden_size: a multiple of 32.
    is_hybrid: a Qwen3.5 instead, whose fourth layer attends and the others have a delta rule.
    """
    torch.manual_seed(0)
    heads = hidden_size // 32
    linear_heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
    linear_sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    config = (Qwen3_5TextConfig if is_hybrid else LlamaConfig)(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN_ID,
        **(linear_heads | linear_sizes if is_hybrid else {}),
    )
    model = (Qwen3_5ForCausalLM if is_hybrid else LlamaForCausalLM)(config)
    model.train(mode=False)
    return model


def random_groups(
    model: PreTrainedModel,
    *,
    num_groups: int,
    group_size: int,
    prompt_tokens: int,
    response_tokens: int,
) -> list[list[Trajectory]]:
    """Return groups of random tokens; rewards 1 and 2 take turns, and weights are near 1."""
    torch.manual_seed(0)
    shape = (num_groups * group_size, prompt_tokens + response_tokens)
    tokens = torch.randint(1, model.config.vocab_size, shape)
    flat = [
        trajectory(
            row,
            ids[:prompt_tokens].tolist(),
            ids[prompt_tokens:].tolist(),
            _logprobs(model, ids)[prompt_tokens:],
            reward=float(1 + row % 2),
        )
        for row, ids in enumerate(tokens)
    ]
    return [flat[start : start + group_size] for start in range(0, len(flat), group_size)]


def log_normal_lengths(count: int, *, median: int, most: int) -> list[int]:
    """Return lengths of responses, in [1, most], whose logarithms have a deviation of 1."""
    random = Random(0)  # noqa: S311 - lengths, no secret
    drawn = (random.lognormvariate(math.log(median), 1.0) for _ in range(count))
    return [min(most, max(1, int(each))) for each in drawn]


def shorten(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """Return a trajectory of one version with the first tokens of its response only."""
    return replace(
        trajectory,
        response_token_ids=trajectory.response_token_ids[:num_tokens],
        rollout_logprobs=trajectory.rollout_logprobs[:num_tokens],
        version_spans=(VersionSpan(policy_version=0, num_tokens=num_tokens),),
    )


@torch.no_grad()
def _logprobs(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Return log-probabilities [tokens] of one sequence; that of the first token is 0."""
    ids = ids.to(model.device)
    states = model.model(ids[None]).last_hidden_state[0, :-1]
    sampled = [0.0]
    for part, targets in zip(
        states.split(_SCORED_TOKENS), ids[1:].split(_SCORED_TOKENS), strict=True
    ):
        logprobs = model.lm_head(part).float().log_softmax(dim=-1)
        sampled += logprobs.gather(1, targets[:, None])[:, 0].tolist()
    return sampled
