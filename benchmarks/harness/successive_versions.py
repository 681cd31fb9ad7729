"""Successive versions of a model of more than 100 M parameters under real AdamW steps."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.api.learner import Optimizer
from vcpo.api.workloads import Precision
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer

VOCABULARY = 32_000
_ROWS, _TOKENS = 1, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A version before and after one step, as bfloat16 payloads."""

    step: int
    before: bytearray
    after: bytearray
    predicted_fraction: float
    """Share of bfloat16 values that should differ."""


def make_model(hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """A Llama with tied embeddings and random parameters, seeded.

    hidden_size: a multiple of 64; 768 with 10 layers gives 119 M parameters.
    """
    torch.manual_seed(0)
    heads = hidden_size // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def updates(
    model: LlamaForCausalLM, *, steps: Collection[int], learning_rate: float
) -> Iterator[Update]:
    """Train on batches of random tokens up to the last of `steps`; yield the update of each.

    steps: From 1 on. The masters are float32 and take every step; only what is published is
        rounded.
    """
    optimizer = PolicyOptimizer(model, Optimizer())
    for step in range(1, max(steps) + 1):
        tokens = torch.randint(1, VOCABULARY, (_ROWS, _TOKENS))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if step not in steps:
            optimizer.step(learning_rate)
            continue
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        before = PublishedState(model).whole(Precision.BFLOAT16)
        optimizer.step(learning_rate)
        yield Update(
            step=step,
            before=before,
            after=PublishedState(model).whole(Precision.BFLOAT16),
            predicted_fraction=predicted_fraction(masters, list(model.parameters())),
        )


@torch.no_grad()
def predicted_fraction(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the expected share of bfloat16 values that change, from the float32 moves.

    A value lies anywhere between two rounding boundaries, so a move of d crosses one with
    probability min(1, d / u), where u is the distance between bfloat16 numbers there: 2^-7 of the
    power of two at or below the value (8 bits of significand).
    """
    crossed = sum(
        float((torch.abs(new - old) / _spacing(old)).clamp(max=1.0).sum())
        for old, new in zip(before, after, strict=True)
    )
    return crossed / sum(tensor.numel() for tensor in before)


def _spacing(values: Tensor) -> Tensor:
    _, exponents = torch.frexp(values.abs().clamp(min=torch.finfo(torch.bfloat16).tiny))
    return torch.ldexp(torch.ones_like(values), exponents - 8)
