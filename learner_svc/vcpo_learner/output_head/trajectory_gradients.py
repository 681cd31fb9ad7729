r"""Each trajectory's gradient of the head: squared norm, and sums over trajectories, by tiles.

A tile of trajectory i's gradient is G_i = sum_t D_t h_t^T over its tokens. Two ways give its norm:

    formed      each tile of G_i is formed, squared, and added to the sums; all of it stays in a
                CPU's cache.
    products    ||G_i||^2 = sum_ts (D_t . D_s)(h_t . h_s): the first factors add up over tiles. The
                sums are products over the tokens of a whole group. Better for short trajectories.

Both need each tile of D once. Tied embeddings have one gradient, so the norm holds the product
of the two uses: <G_i, E_i> = sum_t G_i[x_t] . e_t, with e_t the gradient at the embedding of token
x_t. It needs only those rows of G_i whose tokens the trajectory has read, and they are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vcpo_learner.device import to_device
from vcpo_learner.output_head.gradient_tiles import (
    HeadObjective,
    OwnRows,
    Piece,
    runs_of_tokens,
)

_FLOPS_PER_TOUCH = {"cpu": 12.0, "cuda": 400.0}
"""Multiplications in the time of reading and writing one number of a tile: of a CPU's cache, of a
GPU's memory. The second is a guess."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientSums:
    """Sums over trajectories to add a parameter's gradients to, in place."""

    weighted: Tensor
    """[*parameter] sum_i offset_i G_i."""
    by_group: Tensor
    """[num_groups, *parameter] sum of each group's G_i."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryWeights:
    """How the gradients of trajectories enter the sums."""

    offsets: Sequence[float]
    """[batch]"""
    groups: Sequence[int]
    """[batch] ascending."""


class TrajectoryGradients:
    """Measures the head's gradients of all trajectories of a batch, in one pass over the tiles."""

    def __init__(
        self,
        objective: HeadObjective,
        lengths: Sequence[int],
        *,
        weights: TrajectoryWeights | None = None,
        matrix_sums: GradientSums | None = None,
        bias_sums: GradientSums | None = None,
        own_rows: OwnRows | None = None,
    ) -> None:
        """Take what is measured, and where the sums go.

        lengths: [batch] tokens of each trajectory; the objective has them one after another.
        weights: None forms no sums.
        matrix_sums, bias_sums: None if the parameter is frozen, or no sums are formed.
        own_rows: filled if given; for a tied embedding.
        """
        self._objective = objective
        self._logits = objective.logits
        self._lengths = lengths
        self._counts = to_device(torch.tensor(lengths), objective.targets.device)
        """`lengths` on the device: each copy would wait for it."""
        self._weights = weights
        self._matrix_sums = matrix_sums if weights is not None else None
        self._bias_sums = bias_sums if weights is not None else None
        self._own_rows = own_rows
        self._hidden = objective.logits.factors(objective.logits.hidden)
        self._offsets = self._offset_by_token()
        self._uses_products = [self._is_product_cheaper(at) for at in range(len(lengths))]
        self._grams: dict[int, Tensor] = {}
        """D_t . D_s [tokens, tokens] of the trajectories measured by products."""
        self._open: Tensor | None = None
        """The tile of a trajectory of which more pieces follow."""
        self._open_bias: Tensor | None = None
        self.matrix_norms = torch.zeros(
            len(lengths), dtype=torch.float64, device=objective.targets.device
        )
        """[batch] squared norms; complete after `measure`."""
        self.bias_norms = torch.zeros_like(self.matrix_norms)

    def measure(self) -> None:
        """Go over all tiles; call once."""
        runs = runs_of_tokens(self._lengths, self._busy(), self._logits.size.tokens)
        memory = self._logits.memory()
        is_factor = self._logits.bias is None and not any(self._uses_products)
        tile_of = partial(self._objective.gradient_tile, memory=memory, is_factor=is_factor)
        for vocabulary in self._logits.vocabulary_blocks():
            for run in runs:
                tokens = slice(run[0].tokens.start, run[-1].tokens.stop)
                gradient = tile_of(tokens, vocabulary)
                factors = self._logits.factors(gradient)
                for piece in run:
                    own = _within(tokens, piece, piece)
                    self._add_bias(piece, vocabulary, gradient[own])
                    if self._uses_products[piece.trajectory]:
                        self._add_gram(piece, vocabulary, gradient[own], factors[own])
                    else:
                        self._add_formed(piece, vocabulary, factors[own])
                for group in self._short_groups(run):
                    own = _within(tokens, group[0], group[-1])
                    self._add_products(group, vocabulary, gradient[own], factors[own])
        self._finish_products()

    def _offset_by_token(self) -> Tensor:
        """[tokens] the offset of each token's trajectory; copied to a GPU once, and not by tile."""
        if self._weights is None:
            return self._logits.hidden.new_zeros(0)
        offsets = torch.tensor(self._weights.offsets, dtype=self._logits.dtype)
        offsets = to_device(offsets, self._counts.device)
        return offsets.repeat_interleave(self._counts, output_size=sum(self._lengths))

    def _busy(self) -> list[bool]:
        """Trajectories with a weight; the others have no gradient."""
        is_busy = (self._objective.weights != 0.0).to(self._logits.dtype)
        # The lengths are ours: a check of their sum would wait for a GPU.
        counts = torch.segment_reduce(is_busy, "sum", lengths=self._counts, unsafe=True)
        return [count > 0.0 for count in counts.tolist()]

    def _is_product_cheaper(self, trajectory: int) -> bool:
        """Compare operations per row of the vocabulary; what both ways need is left out."""
        length, hidden = self._lengths[trajectory], self._logits.hidden
        if length > self._logits.size.tokens:
            return False
        touch = _FLOPS_PER_TOUCH.get(hidden.device.type, _FLOPS_PER_TOUCH["cuda"])
        by_products, formed = float(length * length), touch * hidden.shape[1]
        if self._matrix_sums is None or self._weights is None:
            formed += length * hidden.shape[1]
        else:
            formed += touch * hidden.shape[1]
            if self._weights.offsets[trajectory]:
                by_products += length * hidden.shape[1]
                formed += touch * hidden.shape[1]
        return by_products <= formed

    def _add_formed(self, piece: Piece, vocabulary: slice, factors: Tensor) -> None:
        hidden = self._hidden[piece.tokens]
        tile = self._open
        if tile is None:
            tile = self._logits.product(factors.mT, hidden)
        else:
            self._logits.add_product(tile, factors.mT, hidden)
        self._open = None if piece.ends else tile
        if not piece.ends:
            return
        norm = torch.linalg.vector_norm(tile)
        self.matrix_norms[piece.trajectory] += norm.double().square()
        self._add_to(self._matrix_sums, piece.trajectory, vocabulary, tile)
        if self._own_rows is not None:
            self._own_rows.take(piece.trajectory, vocabulary, tile)

    def _add_bias(self, piece: Piece, vocabulary: slice, gradient: Tensor) -> None:
        if self._logits.bias is None:
            return
        tile = gradient.sum(dim=0)
        if self._open_bias is not None:
            tile += self._open_bias
        self._open_bias = None if piece.ends else tile
        if piece.ends:
            self.bias_norms[piece.trajectory] += tile.double().square().sum()
            self._add_to(self._bias_sums, piece.trajectory, vocabulary, tile)

    def _add_to(
        self, sums: GradientSums | None, trajectory: int, vocabulary: slice, tile: Tensor
    ) -> None:
        if sums is None or self._weights is None:
            return
        if offset := self._weights.offsets[trajectory]:
            sums.weighted[vocabulary].add_(tile, alpha=offset)
        sums.by_group[self._weights.groups[trajectory], vocabulary].add_(tile)

    def _add_gram(self, piece: Piece, vocabulary: slice, gradient: Tensor, factors: Tensor) -> None:
        gram = self._grams.get(piece.trajectory)
        if gram is None:
            self._grams[piece.trajectory] = self._logits.product(factors, factors.mT)
        else:
            self._logits.add_product(gram, factors, factors.mT)
        if self._own_rows is not None:
            hidden = self._logits.hidden[piece.tokens]
            self._own_rows.take_products(piece.trajectory, vocabulary, gradient, hidden)

    def _short_groups(self, run: Sequence[Piece]) -> list[list[Piece]]:
        """The pieces measured by products, in runs of neighbors in one group."""
        if self._weights is None or self._matrix_sums is None:
            return []
        groups: list[list[Piece]] = []
        number = self._weights.groups
        for piece in run:
            if not self._uses_products[piece.trajectory]:
                continue
            last = groups[-1][-1] if groups else None
            if (
                last is not None
                and number[last.trajectory] == number[piece.trajectory]
                and last.tokens.stop == piece.tokens.start
            ):
                groups[-1].append(piece)
            else:
                groups.append([piece])
        return groups

    def _add_products(
        self, group: Sequence[Piece], vocabulary: slice, gradient: Tensor, factors: Tensor
    ) -> None:
        """Add to the sums what neighboring trajectories of one group add, with few products."""
        assert self._weights is not None
        assert self._matrix_sums is not None
        hidden = self._hidden[group[0].tokens.start : group[-1].tokens.stop]
        number = self._weights.groups[group[0].trajectory]
        total = self._matrix_sums.by_group[number, vocabulary]
        self._logits.add_product(total, factors.mT, hidden)
        if any(self._weights.offsets[piece.trajectory] for piece in group):
            by_token = self._offsets[group[0].tokens.start : group[-1].tokens.stop, None]
            total = self._matrix_sums.weighted[vocabulary]
            weighted = self._logits.factors(gradient * by_token)
            self._logits.add_product(total, weighted.mT, hidden)

    def _finish_products(self) -> None:
        parts = torch.split(self._hidden, list(self._lengths))
        for at, gram in self._grams.items():
            products = self._logits.product(parts[at], parts[at].mT)
            self.matrix_norms[at] = torch.linalg.vecdot(gram.flatten(), products.flatten())
        self._grams.clear()
        # Rounding may leave the square of a vanishing gradient just under zero.
        self.matrix_norms.clamp_min_(0.0)


def _within(tokens: slice, first: Piece, last: Piece) -> slice:
    return slice(first.tokens.start - tokens.start, last.tokens.stop - tokens.start)
