"""The gradient at the head's products, tile by tile, and the ordinary gradient of its matrix.

For weights a_t of the tokens, the objective sum_t a_t log pi(y_t) has at u_tv = h_t . W_v + b_v
the gradient D_tv = a_t (onehot(y_t)_v - pi_tv) dL_tv/du_tv. Each tile of D is computed from the
logits again, is used at once, and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo_learner.output_head.logit_tiles import TiledLogits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadObjective:
    """A weighted sum of log-probabilities, whose gradient is wanted."""

    logits: TiledLogits
    targets: Tensor
    """[tokens] int64 sampled tokens."""
    log_normalizers: Tensor
    """[tokens], as `TokenDistributions` has them."""
    weights: Tensor
    """[tokens] a_t, in the logits' number type."""

    def gradient_tile(self, tokens: slice, vocabulary: slice, memory: Tensor | None) -> Tensor:
        """Return D [tokens, rows]; in `memory`, if there is any."""
        hidden = self.logits.factors(self.logits.hidden[tokens])
        tile = self.logits.tile(hidden, vocabulary, memory)
        gradient = tile.logits.sub_(self.log_normalizers[tokens, None]).exp_()
        # Every row gets an entry, as a choice of rows would make a GPU wait for the CPU.
        column = self.targets[tokens, None] - vocabulary.start
        is_here = (column >= 0) & (column < gradient.shape[1])
        gradient.scatter_add_(
            1, column.clamp(0, gradient.shape[1] - 1), is_here.to(gradient.dtype).neg_()
        )
        if isinstance(tile.slopes, Tensor):
            gradient.mul_(tile.slopes)
            return gradient.mul_(-self.weights[tokens, None])
        return gradient.mul_(self.weights[tokens, None] * -tile.slopes)


def parameter_gradients(
    objective: HeadObjective, *, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the matrix [vocabulary, hidden] and of the bias [vocabulary].

    needs_bias: whether the second is wanted; None if not.
    """
    logits = objective.logits
    weight = torch.zeros_like(logits.weight, dtype=logits.dtype)
    bias = weight.new_zeros(len(weight)) if needs_bias else None
    memory = logits.memory()
    for vocabulary in logits.vocabulary_blocks():
        for tokens in logits.token_blocks():
            gradient = objective.gradient_tile(tokens, vocabulary, memory)
            if bias is not None:
                bias[vocabulary] += gradient.sum(dim=0)
            hidden = logits.factors(logits.hidden[tokens])
            logits.add_product(weight[vocabulary], logits.factors(gradient).mT, hidden)
    return weight, bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighboring tokens of one trajectory."""

    trajectory: int
    tokens: slice
    ends: bool
    """Whether the trajectory's last token is among them."""

    @property
    def length(self) -> int:
        length: int = self.tokens.stop - self.tokens.start
        return length


def runs_of_tokens(lengths: Sequence[int], is_busy: Sequence[bool], size: int) -> list[list[Piece]]:
    """Return runs of at most `size` tokens: whole trajectories, or one piece of a longer one.

    lengths: [batch] tokens of each trajectory, one after another.
    is_busy: [batch] False for trajectories to leave out.
    """
    runs: list[list[Piece]] = []
    room = stop = 0
    for number, (length, busy) in enumerate(zip(lengths, is_busy, strict=True)):
        start, stop = stop, stop + length
        if not busy or length == 0:
            room = 0
            continue
        if length > room:
            runs += [[] for _ in range(0, length, size)]
            room = size * -(-length // size)
        pieces = [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
        for run, tokens in zip(runs[-len(pieces) :], pieces, strict=True):
            run.append(Piece(trajectory=number, tokens=tokens, ends=tokens.stop == stop))
        room = room - length if len(pieces) == 1 else 0
    return runs
