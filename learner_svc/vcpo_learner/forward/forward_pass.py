"""A forward pass over a micro-batch, and the way from it to gradient norms and their sum.

with norms      the pass is recorded; its backward pass measures them and forms the sum
without norms   they are reported as 0, and the sum is a plain backward pass
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.forward.packed_rows import PackedRow
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import TokenBatch
from vcpo_learner.per_sample_gradients.backward import MeasuredGradients, measure_gradients
from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.per_sample_gradients.taps import Recording, record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


def forward_pass(
    network: PolicyNetwork,
    slots: Slots,
    batch: TokenBatch,
    *,
    measures_norms: bool,
    temperature: float,
    tiles: bool | None = None,
) -> RecordedPass | PlainPass:
    """Run the model forward, and keep what the norms need, if they are measured.

    tiles: whether the head is tiled; None decides by the number of logits.
    slots: of the model, for the norms.
    """
    tiles = network.has_tiles(batch) if tiles is None else tiles
    wanted = Wanted(temperature=temperature, tiles=tiles)
    if measures_norms:
        with record_calls(slots) as recording:
            scores = network.score(batch, wanted)
        return RecordedPass(
            recording=recording,
            logprobs=batch.place_trained(scores.logprobs),
            row=batch.row,
        )
    return PlainPass(logprobs=batch.place_trained(network.score(batch, wanted).logprobs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPass:
    """Log-probabilities with their graph, [batch, width] nats, and the measurement of norms."""

    recording: Recording
    logprobs: Tensor
    row: PackedRow | None

    def measure(
        self,
        weights: Tensor,
        weighted_sum: WeightedSum | None = None,
        *,
        retain_graph: bool = False,
    ) -> MeasuredGradients:
        """Measure the norms of the gradients of sum_t a_t log pi(y_t); call once.

        weights: [batch, width] a_t. weighted_sum: to form beside the norms; None forms none.
        retain_graph: keep the graph of `logprobs` for another backward pass.
        """
        objectives = weighted_logprobs(self.logprobs, weights)
        return measure_gradients(
            objectives,
            self.recording,
            weighted_sum,
            packing=None if self.row is None else self.row.packing,
            retain_graph=retain_graph,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainPass:
    """As `RecordedPass`, without norms."""

    logprobs: Tensor

    def measure(
        self,
        weights: Tensor,
        weighted_sum: WeightedSum | None = None,
        *,
        retain_graph: bool = False,
    ) -> PlainSum:
        return PlainSum(
            squared_norms=torch.zeros(len(weights), dtype=torch.float64, device=weights.device),
            objectives=weighted_logprobs(self.logprobs, weights),
            weighted_sum=weighted_sum,
            retain_graph=retain_graph,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainSum:
    """As `MeasuredGradients`."""

    squared_norms: Tensor
    objectives: Tensor
    weighted_sum: WeightedSum | None
    retain_graph: bool
    unused: Set[Slot] = frozenset()
    """Not looked for: autograd itself finds every use."""

    def add_to_parameters(self, slopes: Sequence[float]) -> None:
        assert self.weighted_sum is not None  # it was given
        coefficients = self.weighted_sum.coefficients(self.objectives.new_tensor(slopes))
        total = (self.objectives * coefficients).sum()
        torch.autograd.backward(total, retain_graph=self.retain_graph)


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
    scores = PolicyNetwork.of(model).score(batch, Wanted(temperature=temperature, entropies=True))
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
