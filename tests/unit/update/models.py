"""Small models of three families, and batches of trajectories that they might have sampled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import add
from random import Random

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan

VOCABULARY = 23
PAD = 0


def llama(*, tied: bool = False) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            pad_token_id=PAD,
        )
    )


def qwen2(*, tied: bool = True) -> nn.Module:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            pad_token_id=PAD,
        )
    )


def gpt2(*, tied: bool = True) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            tie_word_embeddings=tied,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "qwen2": lambda: qwen2(tied=False),
    "qwen2 tied": qwen2,
    "gpt2": lambda: gpt2(tied=False),
    "gpt2 tied": gpt2,
}


class ExactNorm(nn.RMSNorm):
    """Stands in for the norms of transformers, which round to float32 whatever they are given."""


def seeded(make: Callable[[], nn.Module], *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model whose parameters are all random, norms and biases too."""
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    if dtype is torch.float64:
        _replace_norms(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def _replace_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = ExactNorm(len(child.weight), eps=child.variance_epsilon)
                setattr(module, name, exact.double())


def trajectory(
    number: int,
    *,
    prompt: tuple[int, ...] = (3, 4),
    response: tuple[int, ...] = (5, 6, 7),
    logprobs: tuple[float, ...] | None = None,
    reward: float = 0.0,
    policy_version: int = 0,
) -> Trajectory:
    return Trajectory(
        trajectory_id=f"lease/{number}",
        prompt_token_ids=prompt,
        response_token_ids=response,
        rollout_logprobs=logprobs or (-3.0,) * len(response),
        version_spans=(VersionSpan(policy_version=policy_version, num_tokens=len(response)),),
        reward=reward,
        finish_reason=FinishReason.STOP,
    )


def own_logprobs(model: nn.Module, one: Trajectory, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [sampled tokens] of one trajectory, alone and without padding."""
    tokens = torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]])
    logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)
    start = len(one.prompt_token_ids)
    return torch.stack(
        [
            logprobs[start + t - 1, token]
            for t, token in enumerate(one.response_token_ids)
            if not any(span.start <= t < span.end for span in one.inserted_spans)
        ]
    )


def sampled_groups(
    model: nn.Module, *, num_groups: int = 3, group_size: int = 4, staleness: float = 0.3
) -> list[list[Trajectory]]:
    """Groups of random tokens and lengths; within each, rewards differ.

    staleness: largest change per token between the model's log-probabilities and the rollouts'.
    """
    random = Random(0)
    groups = []
    for group in range(num_groups):
        prompt = _random_tokens(random, at_most=5)
        rows = []
        for row in range(group_size):
            drawn = trajectory(
                group * group_size + row,
                prompt=prompt,
                response=_random_tokens(random, at_most=6),
                reward=row % 2 + 0.25 * row + 0.5 * group,
            )
            noise = [random.uniform(-staleness, staleness) for _ in drawn.response_token_ids]
            rows.append(sampled_by(model, drawn, noise))
        groups.append(rows)
    return groups


def sampled_by(model: nn.Module, one: Trajectory, noise: Sequence[float]) -> Trajectory:
    """The same tokens as sampled by a policy that is off the model's by `noise` nats per token."""
    with torch.no_grad():
        exact = own_logprobs(model, one).tolist()
    return replace(one, rollout_logprobs=tuple(map(add, exact, noise)))


def with_rewards(group: Sequence[Trajectory], rewards: Sequence[float]) -> list[Trajectory]:
    return [replace(one, reward=reward) for one, reward in zip(group, rewards, strict=True)]


def _random_tokens(random: Random, *, at_most: int) -> tuple[int, ...]:
    return tuple(random.choices(range(1, VOCABULARY), k=random.randint(1, at_most)))
