"""A head in a recorded forward pass: it measures its parameters and hands the norms on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo_learner.output_head.gradient_tiles import HeadObjective, OwnRows, own_rows
from vcpo_learner.output_head.trajectory_gradients import (
    GradientSums,
    TrajectoryGradients,
    TrajectoryWeights,
)
from vcpo_learner.per_sample_gradients.slots import Slot
from vcpo_learner.per_sample_gradients.taps import Recording
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


@dataclass(slots=True, eq=False)
class RecordedHead:
    """Observes a head for a recording that measures all of a model's parameters."""

    recording: Recording
    slots: Mapping[str, Slot]
    """Of the head's trainable parameters, `weight` or `bias`."""
    lengths: Sequence[int]
    """[batch] scored tokens of each trajectory."""
    token_ids: Tensor
    """[batch, width] what the trajectories have read."""
    is_token: Tensor
    """[batch, width]; False for padding."""

    def __post_init__(self) -> None:
        for slot in self.slots.values():
            self.recording.expect(slot)

    @torch.no_grad()
    def measure(self, objective: HeadObjective) -> None:
        """Measure the head's gradients, add them to the sums, and hand the norms on."""
        measuring = self.recording.measuring
        assert measuring is not None
        matrix, bias = self.slots.get("weight"), self.slots.get("bias")
        weighted_sum, rows = measuring.weighted_sum, self._own_rows(objective)
        gradients = TrajectoryGradients(
            objective,
            self.lengths,
            weights=_weights(weighted_sum),
            matrix_sums=_sums(weighted_sum, matrix),
            bias_sums=_sums(weighted_sum, bias),
            own_rows=rows,
        )
        gradients.measure()
        if matrix is not None:
            measuring.receive_measured(matrix, gradients.matrix_norms, rows)
        if bias is not None:
            measuring.receive_measured(bias, gradients.bias_norms)

    def _own_rows(self, objective: HeadObjective) -> OwnRows | None:
        """Rows for the product with the embedding's gradient, if the matrix is used there too."""
        matrix, logits = self.slots.get("weight"), objective.logits
        if matrix is None or self.recording.num_uses[matrix] == 1:
            return None
        return own_rows(
            self.token_ids, self.is_token, logits.weight, logits.size.vocabulary, logits.dtype
        )


def _weights(weighted_sum: WeightedSum | None) -> TrajectoryWeights | None:
    if weighted_sum is None:
        return None
    offsets: list[float] = weighted_sum.offsets.tolist()
    return TrajectoryWeights(offsets=offsets, groups=weighted_sum.groups)


def _sums(weighted_sum: WeightedSum | None, slot: Slot | None) -> GradientSums | None:
    if weighted_sum is None or slot is None:
        return None
    sums = weighted_sum.sums
    (weighted,), (by_group,) = sums.weighted_sums([slot]), sums.by_groups([slot])
    return GradientSums(weighted=weighted, by_group=by_group)
