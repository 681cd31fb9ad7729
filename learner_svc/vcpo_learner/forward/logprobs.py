"""Log-probabilities of the sampled tokens under the target policy, and related quantities.

A model is a causal language model, called as those of transformers are, or a `PolicyNetwork`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import TokenBatch


def token_logprobs(model: nn.Module, batch: TokenBatch, *, temperature: float) -> Tensor:
    """Return the log-probabilities of the trained tokens under softmax(logits / temperature).

    temperature: above 0; the one that the rollouts were sampled at.
    Returns: [batch, width] nats, 0 elsewhere. Float32 or better whatever the logits'
    type: bfloat16 keeps 3 digits, and an importance weight is a sum over thousands of tokens.
    """
    scores = PolicyNetwork.of(model).score(batch, Wanted(temperature=temperature))
    return batch.place_trained(scores.logprobs)


@torch.no_grad()
def token_entropies(model: nn.Module, batch: TokenBatch, *, temperature: float) -> Tensor:
    """Entropy of the distribution that each response token was drawn against, [batch, width] nats.

    Of the target policy, not the behavior policy; 0 elsewhere; without a graph.
    """
    wanted = Wanted(temperature=temperature, entropies=True)
    scores = PolicyNetwork.of(model).score(batch, wanted)
    assert scores.entropies is not None
    return batch.place_trained(scores.entropies)


@torch.no_grad()
def prefix_states(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the last hidden state before each token, [batch, width, hidden], for a value head.

    Column t is the state after token t - 1; column 0 is 0; without a graph.
    """
    states = PolicyNetwork.of(model).last_states(batch)
    if batch.row is not None:
        states = batch.row.unpack(states)
    return functional.pad(states[:, :-1], (0, 0, 1, 0))


def weighted_logprobs(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight times log-probability, [batch].

    logprobs, weights: [batch, width]; weights are held constant. A token of weight 0 is left out
    even where its log-probability is -inf, so that its gradient is 0 and not NaN.
    """
    constant = weights.detach().to(logprobs.dtype)
    return (logprobs * constant).masked_fill(constant == 0.0, 0.0).sum(dim=1)
