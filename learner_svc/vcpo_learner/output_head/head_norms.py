"""Norms of the head's own gradient, measured by a backward pass that ends at the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vcpo_learner.output_head.gradient_tiles import HeadObjective
from vcpo_learner.output_head.trajectory_gradients import TrajectoryGradients


class HeadNorms:
    """Measures ||sum_t b_t h_t^T||^2 of the head's matrix, frozen or not, for each trajectory."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Observe one forward pass; lengths: [batch] scored tokens of each trajectory."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A number that needs a gradient, and gets none."""
        self._lengths = lengths
        self._norms: Tensor | None = None
        self._is_measuring = False

    @property
    def is_measuring(self) -> bool:
        """Whether the backward pass at hand is `squared_norms`."""
        return self._is_measuring

    def measure(self, objective: HeadObjective) -> None:
        """Take the objective whose gradient is wanted."""
        gradients = TrajectoryGradients(objective, self._lengths)
        gradients.measure()
        self._norms = gradients.matrix_norms

    def squared_norms(self, objective: Tensor) -> Tensor:
        """Return the squared norms [batch] float64; the graph stays for another backward pass.

        objective: a sum over trajectories of weighted log-probabilities of the observed pass.
        """
        self._is_measuring = True
        try:
            torch.autograd.grad(objective, [self.anchor], retain_graph=True, allow_unused=True)
        finally:
            self._is_measuring = False
        assert self._norms is not None
        return self._norms
