"""How likely the learner's policy finds the tokens that were sampled."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.batch import TokenBatch


def token_logprobs(model: nn.Module, batch: TokenBatch, *, temperature: float) -> Tensor:
    """Log-probabilities of the response tokens under softmax(logits / temperature).

    model: a causal language model called as those of transformers are; it returns `.logits`
        [batch, width, vocabulary], of which column t speaks of token t + 1.
    temperature: above 0; the one that the rollouts were sampled at.
    Returns: [batch, width] nats, 0 outside the response. Float32 or better whatever the logits'
    type: bfloat16 keeps 3 digits, and an importance weight is a sum over thousands of tokens.
    """
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=_positions(batch),
        use_cache=False,
    ).logits
    first = int(batch.response_mask.any(dim=0).nonzero()[0])
    predictions = logits[:, first - 1 : -1]
    precise = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    logprobs = functional.log_softmax(precise / temperature, dim=-1)
    sampled = logprobs.gather(2, batch.input_ids[:, first:, None]).squeeze(2)
    return functional.pad(sampled, (first, 0)).masked_fill(~batch.response_mask, 0.0)


def mean_response_logprobs(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Mean log-probability of each trajectory's response tokens, [batch], nats per token."""
    return logprobs.sum(dim=1) / batch.response_mask.sum(dim=1)


def response_logprobs(logprobs: Tensor, batch: TokenBatch) -> list[list[float]]:
    """Log-probabilities as plain numbers, one list per trajectory without the padding."""
    lengths: list[int] = batch.response_mask.sum(dim=1).tolist()
    rows = torch.split(logprobs.detach()[batch.response_mask], lengths)
    return [row.tolist() for row in rows]


def _positions(batch: TokenBatch) -> Tensor:
    """Positions [batch, width], one row per trajectory.

    Left to itself a model may share one row of them among all trajectories; the gradient of a
    learned position embedding would then no longer belong to one.
    """
    width = batch.input_ids.shape[1]
    return torch.arange(width, device=batch.input_ids.device).expand_as(batch.input_ids)
