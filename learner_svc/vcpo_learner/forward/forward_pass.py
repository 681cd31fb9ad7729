"""A forward pass over a micro-batch, and the way from it to gradient norms and their sum.

    with norms      the pass is recorded; its backward pass measures them and forms the sum
    without norms   they are reported as 0, and the sum is a plain backward pass

Both have the same interface: log-probabilities; then squared norms, given weights of the tokens;
then the weighted sum of gradients, given slopes that depend on the norms.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

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


class GradientSum(Protocol):
    """Norms, and the weighted sum that still needs its slopes."""

    @property
    def squared_norms(self) -> Tensor:
        """[batch] float64, at least 0."""

    @property
    def unused(self) -> Set[Slot]:
        """Slots that are known to have no gradient in this pass."""

    def add_to_parameters(self, slopes: Sequence[float]) -> None:
        """Complete the gradient; call once, after the last micro-step that shares its sums.

        slopes: [num_groups].
        """


class ForwardPass(Protocol):
    """Log-probabilities with their graph, and the measurement of norms."""

    @property
    def logprobs(self) -> Tensor:
        """[batch, width] nats, as `token_logprobs`."""

    def measure(
        self,
        weights: Tensor,
        weighted_sum: WeightedSum | None = None,
        *,
        retain_graph: bool = False,
    ) -> GradientSum:
        """Measure the norms of the gradients of sum_t a_t log pi(y_t); call once.

        weights: [batch, width] a_t.
        weighted_sum: the sum to form beside the norms; None forms none.
        retain_graph: keep the graph of `logprobs` for another backward pass.
        """


def forward_pass(
    network: PolicyNetwork,
    slots: Slots,
    batch: TokenBatch,
    *,
    measures_norms: bool,
    temperature: float,
    tiles: bool | None = None,
) -> ForwardPass:
    """Run the model forward, and keep what the norms need, if they are measured.

    tiles: whether the head is tiled; None decides by the number of logits.
    slots: of the model, for the norms.
    """
    tiles = network.has_tiles(batch) if tiles is None else tiles
    wanted = Wanted(temperature=temperature, tiles=tiles)
    if measures_norms:
        with record_calls(slots) as recording:
            scores = network.score(batch, wanted)
        return _RecordedPass(
            recording=recording,
            logprobs=batch.place_trained(scores.logprobs),
            row=batch.row,
        )
    return _PlainPass(logprobs=batch.place_trained(network.score(batch, wanted).logprobs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordedPass:
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
        objectives = weighted_logprobs(self.logprobs, weights)
        return measure_gradients(
            objectives,
            self.recording,
            weighted_sum,
            packing=None if self.row is None else self.row.packing,
            retain_graph=retain_graph,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PlainPass:
    """A forward pass without norms."""

    logprobs: Tensor

    def measure(
        self,
        weights: Tensor,
        weighted_sum: WeightedSum | None = None,
        *,
        retain_graph: bool = False,
    ) -> "_PlainSum":
        return _PlainSum(
            squared_norms=torch.zeros(len(weights), dtype=torch.float64, device=weights.device),
            objectives=weighted_logprobs(self.logprobs, weights),
            weighted_sum=weighted_sum,
            retain_graph=retain_graph,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PlainSum:
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
