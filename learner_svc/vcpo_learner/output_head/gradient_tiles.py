"""The gradient at the head's products, tile by tile, and the ordinary gradient of its matrix.

For weights a_t of the tokens, the objective sum_t a_t log pi(y_t) has at u_tv = h_t . W_v + b_v
the gradient D_tv = a_t (onehot(y_t)_v - pi_tv) dL_tv/du_tv. Each tile of D is computed from the
logits again, is used at once, and never kept. `OwnRows` takes from it the rows of each trajectory's
gradient at the tokens that it has read, for tied embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vcpo_learner.device import to_device
from vcpo_learner.output_head.logit_tiles import Finish, TiledLogits, finished


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

    def gradient_tile(
        self, tokens: slice, vocabulary: slice, memory: Tensor | None, *, is_factor: bool = False
    ) -> Tensor:
        """Return D [tokens, rows]; in `memory`, if there is any.

        is_factor: whether only its `factors` are wanted, of whose type it then is.
        """
        logits, of_tokens = self.logits, (self.log_normalizers, self.weights)
        tile = logits.tile(logits.factors(logits.hidden[tokens]), vocabulary, memory)
        columns = self.targets[tokens, None] - vocabulary.start
        numbers = columns, *(each[tokens, None] for each in of_tokens)
        dtype = logits.input_dtype if is_factor else logits.dtype
        found: Tensor = logits.run(_gradient, tile.products, tile.finish, *numbers, dtype)
        return found


def _gradient(
    products: Tensor,
    finish: Finish,
    columns: Tensor,
    log_normalizers: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return D [tokens, rows] in a number type, given numbers [tokens, 1].

    columns: of the sampled tokens, which may lie outside of the tile.
    """
    logits, slopes = finished(products, finish)
    gradient, width = logits.sub_(log_normalizers).exp_(), products.shape[1]
    if torch.compiler.is_compiling():
        gradient.sub_((torch.arange(width, device=columns.device) == columns).to(gradient.dtype))
    else:
        # Every row gets an entry, as a choice of rows would make a GPU wait for the CPU.
        is_here = (columns >= 0) & (columns < width)
        columns = columns.clamp(0, width - 1)
        gradient.scatter_add_(1, columns, is_here.to(gradient.dtype).neg_())
    if isinstance(slopes, Tensor):
        gradient.mul_(slopes).mul_(-weights)
    else:
        gradient.mul_(weights * -slopes)
    return gradient.to(dtype)


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
            is_factor = bias is None
            gradient = objective.gradient_tile(tokens, vocabulary, memory, is_factor=is_factor)
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


@dataclass(slots=True, kw_only=True, eq=False)
class OwnRows:
    """Rows G_i[x] of each trajectory i, for every token x that it has read, each once."""

    num_tokens: int
    """Size of the vocabulary."""
    keys: Tensor
    """[rows] int64 trajectory * num_tokens + token, ascending."""
    rows: Tensor
    """[rows, hidden] filled tile by tile; 0 where no gradient arrived."""
    _columns: Tensor
    """[rows] int64 the token's column in its tile."""
    _places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """First and last row of a trajectory in a tile, by (trajectory, first token of the tile)."""

    def take(self, trajectory: int, vocabulary: slice, tile: Tensor) -> None:
        """Copy the rows that a tile [rows, hidden] of the gradient holds."""
        first, last = self._places[trajectory, vocabulary.start]
        if first < last:
            self.rows[first:last] = tile[self._columns[first:last]]

    def take_products(
        self, trajectory: int, vocabulary: slice, gradient: Tensor, hidden: Tensor
    ) -> None:
        """Form the rows that a tile holds from D [tokens, rows] and the tokens' hidden states."""
        first, last = self._places[trajectory, vocabulary.start]
        if first < last:
            chosen = gradient[:, self._columns[first:last]]
            torch.mm(chosen.mT, hidden.to(chosen.dtype), out=self.rows[first:last])

    def inner_products(self, token_ids: Tensor, gradients: Tensor) -> Tensor:
        """Return <G_i, E_i> [batch] float64, with E_i the gradient of the embedding.

        token_ids: [batch, tokens] that the trajectories have read, and padding.
        gradients: [batch, tokens, hidden] at their embeddings; 0 at padding.
        """
        numbers = torch.arange(len(token_ids), device=token_ids.device)[:, None]
        wanted = numbers * self.num_tokens + token_ids
        places = torch.searchsorted(self.keys, wanted).clamp_max(len(self.keys) - 1)
        # Padding has any token, and a gradient of 0.
        is_padding = self.keys[places] != wanted
        found = self.rows[places].masked_fill(is_padding[..., None], 0.0)
        products: Tensor = torch.linalg.vecdot(found, gradients.to(found.dtype))
        return products.sum(dim=1, dtype=torch.float64)


def own_rows(
    token_ids: Tensor, is_token: Tensor, head: Tensor, rows_per_tile: int, dtype: torch.dtype
) -> OwnRows:
    """Return the rows to fill, all 0.

    token_ids, is_token: [batch, width] what the trajectories have read; False for padding.
    head: [vocabulary, hidden] matrix.
    dtype: of the rows.
    """
    batch, vocabulary = len(token_ids), len(head)
    numbers = torch.arange(batch, device=token_ids.device)[:, None] * vocabulary
    keys = torch.unique((numbers + token_ids)[is_token])
    starts = list(range(0, vocabulary, rows_per_tile))
    edges = numbers + to_device(torch.tensor([*starts, vocabulary]), keys.device)
    places = torch.searchsorted(keys, edges).tolist()
    return OwnRows(
        num_tokens=vocabulary,
        keys=keys,
        rows=head.new_zeros(len(keys), head.shape[1], dtype=dtype),
        _columns=keys % vocabulary % rows_per_tile,
        _places={
            (trajectory, start): (row[at], row[at + 1])
            for trajectory, row in enumerate(places)
            for at, start in enumerate(starts)
        },
    )
