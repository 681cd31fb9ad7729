"""A head in a recorded forward pass: it measures its parameters and hands the norms on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vcpo_learner.output_head.gradient_tiles import HeadObjective
from vcpo_learner.output_head.own_rows import OwnRows, own_rows
from vcpo_learner.output_head.trajectory_gradients import (
    GradientSums,
    TrajectoryGradients,
    TrajectoryWeights,
)
from vcpo_learner.per_sample_gradients.slots import Slot
from vcpo_learner.per_sample_gradients.taps import Recording
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


class RecordedHead:
    """Observes a head for a recording that measures all of a model's parameters."""

    def __init__(
        self,
        recording: Recording,
        slots: Mapping[str, Slot],
        lengths: Sequence[int],
        token_ids: Tensor,
        is_token: Tensor,
    ) -> None:
        """Announce the uses of the head's parameters to the recording.

        slots: of the head's trainable parameters, `weight` or `bias`.
        lengths: [batch] scored tokens of each trajectory.
        token_ids, is_token: [batch, width] what the trajectories have read; False for padding.
        """
        self._recording = recording
        self._slots = slots
        self._lengths = lengths
        self._token_ids = token_ids
        self._is_token = is_token
        for slot in slots.values():
            recording.expect(slot)

    @property
    def anchor(self) -> Tensor:
        return self._recording.anchor

    @property
    def is_measuring(self) -> bool:
        return self._recording.measuring is not None

    @torch.no_grad()
    def measure(self, objective: HeadObjective) -> None:
        """Measure the head's gradients, add them to the sums, and hand the norms on."""
        measuring = self._recording.measuring
        assert measuring is not None
        matrix, bias = self._slots.get("weight"), self._slots.get("bias")
        weighted_sum, rows = measuring.weighted_sum, self._own_rows(objective)
        gradients = TrajectoryGradients(
            objective,
            self._lengths,
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
        matrix, logits = self._slots.get("weight"), objective.logits
        if matrix is None or self._recording.num_uses[matrix] == 1:
            return None
        return own_rows(
            self._token_ids, self._is_token, logits.weight, logits.size.vocabulary, logits.dtype
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
