"""A forward pass over a micro-batch, and the way from it to gradient norms and their sum.

with norms      the pass is recorded; its backward pass measures them and forms the sum
without norms   they are reported as 0, and the sum is a plain backward pass
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo_learner.forward.logprobs import weighted_logprobs
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
        if self.weighted_sum is None:
            raise ValueError("weighted_sum is None: only norms were measured; give one")
        coefficients = self.weighted_sum.coefficients(self.objectives.new_tensor(slopes))
        total = (self.objectives * coefficients).sum()
        torch.autograd.backward(total, retain_graph=self.retain_graph)
