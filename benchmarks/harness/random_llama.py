"""A Llama with random parameters and a batch for it to train on, for benchmarks of an update."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan

VOCABULARY = 512
PAD_TOKEN_ID = 0


def random_llama(hidden_size: int, *, max_tokens: int) -> LlamaForCausalLM:
    """A Llama of 3 layers with heads of 32 and a head of its own, seeded.

    hidden_size: a multiple of 32.
    """
    torch.manual_seed(0)
    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN_ID,
    )
    model = LlamaForCausalLM(config)
    model.train(mode=False)
    return model


def random_groups(
    model: LlamaForCausalLM,
    *,
    num_groups: int,
    group_size: int,
    prompt_tokens: int,
    response_tokens: int,
) -> list[list[Trajectory]]:
    """Return groups of random tokens; rewards 1 and 2 take turns, and weights are near 1."""
    torch.manual_seed(0)
    tokens = torch.randint(
        1, VOCABULARY, (num_groups * group_size, prompt_tokens + response_tokens)
    )
    flat = [
        Trajectory(
            trajectory_id=str(row),
            prompt_token_ids=tuple(ids[:prompt_tokens].tolist()),
            response_token_ids=tuple(ids[prompt_tokens:].tolist()),
            rollout_logprobs=tuple(_logprobs(model, ids)[prompt_tokens:]),
            version_spans=(VersionSpan(policy_version=0, num_tokens=response_tokens),),
            reward=float(1 + row % 2),
            finish_reason=FinishReason.STOP,
        )
        for row, ids in enumerate(tokens)
    ]
    return [flat[start : start + group_size] for start in range(0, len(flat), group_size)]


@torch.no_grad()
def _logprobs(model: LlamaForCausalLM, ids: Tensor) -> list[float]:
    """Return log-probabilities [tokens] of one sequence; that of the first token is 0."""
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(dim=-1)
    sampled: list[float] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    return [0.0, *sampled]
