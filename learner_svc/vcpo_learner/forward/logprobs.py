"""Log-probabilities of the sampled tokens under the target policy, and related quantities."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.forward.norm_proxies import logit_energies
from vcpo_learner.forward.token_batch import TokenBatch


def token_logprobs(model: nn.Module, batch: TokenBatch, *, temperature: float) -> Tensor:
    """Return the log-probabilities of the trained tokens under softmax(logits / temperature).

    model: a causal language model called as those of transformers are; it returns `.logits`
        [batch, width, vocabulary], whose column t predicts token t + 1.
    temperature: above 0; the one that the rollouts were sampled at.
    Returns: [batch, width] nats, 0 elsewhere. Float32 or better whatever the logits'
    type: bfloat16 keeps 3 digits, and an importance weight is a sum over thousands of tokens.
    """
    distributions = _log_distributions(model, batch, temperature)
    return batch.place_trained(_of_sampled(distributions, batch))


def token_logprobs_and_energies(
    model: nn.Module, batch: TokenBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the `logit_energies` of the same tokens, from one forward pass.

    Returns: both [batch, width], 0 outside the response; the energies without a graph.
    """
    distributions = _log_distributions(model, batch, temperature)
    logprobs = _of_sampled(distributions, batch)
    energies = logit_energies(distributions.detach(), logprobs.detach())
    return batch.place_trained(logprobs), batch.place_trained(energies)


def token_entropies(model: nn.Module, batch: TokenBatch, *, temperature: float) -> Tensor:
    """Entropy of the distribution that each response token was drawn against, [batch, width] nats.

    Of the target policy, not the behavior policy; 0 elsewhere.
    """
    logprobs = _log_distributions(model, batch, temperature)
    return batch.place_trained(torch.special.entr(logprobs.exp()).sum(dim=-1))


def prefix_states(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the last hidden state before each token, [batch, width, hidden], for a value head.

    Column t is the state after token t - 1; column 0 is 0.
    """
    states: Tensor = model(**_inputs(batch), output_hidden_states=True).hidden_states[-1]
    if batch.rows is not None:
        states = batch.rows.unpack(states)
    return functional.pad(states[:, :-1], (0, 0, 1, 0))


def weighted_logprobs(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight times log-probability, [batch].

    logprobs, weights: [batch, width]; weights are held constant. A token of weight 0 is left out
    even where its log-probability is -inf, so that its gradient is 0 and not NaN.
    """
    constant = weights.detach().to(logprobs.dtype)
    return (logprobs * constant).masked_fill(constant == 0.0, 0.0).sum(dim=1)


def _log_distributions(model: nn.Module, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities [sampled tokens, vocabulary], one trajectory after another."""
    logits: Tensor = model(**_inputs(batch)).logits
    # The logits that predict a token are at the token before it.
    predictions = logits.flatten(0, 1).index_select(0, _places(batch)[batch.response_mask] - 1)
    precise = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    return functional.log_softmax(precise / temperature, dim=-1)


def _of_sampled(distributions: Tensor, batch: TokenBatch) -> Tensor:
    """Entries of [sampled tokens, vocabulary] at the tokens themselves, [sampled tokens]."""
    return distributions.gather(1, batch.input_ids[batch.response_mask][:, None]).squeeze(1)


def _inputs(batch: TokenBatch) -> dict[str, Any]:
    """The arguments of a model's call."""
    if batch.rows is None:
        return {
            # Padding is on the right, where causal attention does not look: no mask is needed.
            "input_ids": batch.input_ids,
            "position_ids": _positions(batch),
            "use_cache": False,
        }
    return {
        "input_ids": batch.rows.pack(batch.input_ids, fill=0),
        **batch.rows.arguments,
        "use_cache": False,
    }


def _places(batch: TokenBatch) -> Tensor:
    """Index [batch, width] of each token in the model's flattened input."""
    if batch.rows is not None:
        return batch.rows.places
    return torch.arange(batch.input_ids.numel(), device=batch.input_ids.device).view_as(
        batch.input_ids
    )


def _positions(batch: TokenBatch) -> Tensor:
    """Positions [batch, width], one row per trajectory.

    Without them a model may share one row of positions among all trajectories; the gradient of a
    learned position embedding could then not be attributed to one of them.
    """
    width = batch.input_ids.shape[1]
    return torch.arange(width, device=batch.input_ids.device).expand_as(batch.input_ids)
