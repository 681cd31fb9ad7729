"""The logits of an output head, one tile of tokens and vocabulary at a time.

A tile of logits L [tokens, vocabulary] follows from hidden states h, a head's matrix W and bias b:

    u = h W^T + b
    L = scale u / temperature                     or, with a cap,
    L = cap tanh(scale u / cap) / temperature

Matrix products take their inputs in the number type that the model computes in, and add up in
float32 or better. A CPU holds them in the type that it adds up in, rounded all the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcpo_learner.per_sample_gradients.taps import run


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitForm:
    """How a family of models turns a head's products into logits."""

    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    softcap: float | None = None
    """Gemma's `final_logit_softcapping`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """The rows of a head that are tokens; no sum has another, and no other gets a gradient."""

    count: int
    """Rows from here on are no tokens."""
    is_hole: Tensor | None = None
    """[count] rows among the others that are no tokens either; None if there is none."""

    def of(self, logits: Tensor) -> Tensor:
        narrow = logits[..., : self.count]
        return narrow if self.is_hole is None else narrow.masked_fill(self.is_hole, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSize:
    """Tokens and rows of the vocabulary in one tile of logits."""

    tokens: int
    vocabulary: int


_TILE_SIZES = {
    "cpu": TileSize(tokens=256, vocabulary=1024),
    "cuda": TileSize(tokens=8192, vocabulary=8192),
}
"""A tile in float32 has 1 MiB for a CPU, which stays in its cache, and 256 MiB for a GPU, which
keeps it busy. The second is a choice that no measurement supports yet."""
_NEVER = -1e30
"""A logit whose exponential is 0; finite, and so are its products with numbers of logits."""


def tile_size(device: torch.device) -> TileSize:
    """Return the size of tiles on a device."""
    return _TILE_SIZES.get(device.type, _TILE_SIZES["cuda"])


class Finish(NamedTuple):
    """What makes products u logits; a tuple, whose tensors a compiler finds."""

    form: LogitForm
    temperature: float
    bias: Tensor | None = None
    """[rows]"""
    is_hole: Tensor | None = None
    """[rows] rows that are no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """The products of some tokens with some rows of the vocabulary."""

    weight: Tensor
    """[rows, hidden] the head's rows, as the products need them."""
    products: Tensor
    """[tokens, rows] without the bias; the caller may overwrite them."""
    finish: Finish


def finished(products: Tensor, finish: Finish) -> tuple[Tensor, Tensor | float]:
    """Return the logits [tokens, rows] of products [tokens, rows], and the slopes dL/du.

    The products are overwritten, unless the function is a part of one kernel. The slopes are
    [tokens, rows], or the same for all.
    """
    logits = products.clone() if torch.compiler.is_compiling() else products
    if finish.bias is not None:
        logits.add_(finish.bias)
    cap, slope = finish.form.softcap, finish.form.scale / finish.temperature
    slopes: Tensor | float = slope
    if cap is None:
        if slope != 1.0:
            logits.mul_(slope)
    else:
        share = logits.mul_(finish.form.scale / cap).tanh_()
        slopes = (1.0 - share.square()).mul_(slope)
        logits.mul_(cap / finish.temperature)
    if finish.is_hole is not None:
        logits.masked_fill_(finish.is_hole, _NEVER)
    return logits, slopes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledLogits:
    """The logits of all tokens, never in memory at once."""

    hidden: Tensor
    """[tokens, hidden]"""
    weight: Tensor
    """[vocabulary, hidden]"""
    bias: Tensor | None
    """[vocabulary]"""
    form: LogitForm
    temperature: float
    input_dtype: torch.dtype
    """Number type of the products' inputs."""
    size: TileSize
    rows: TokenRows | None = None
    """The head's rows that are tokens; None if all are."""
    is_fused: bool = False
    """Whether a GPU computes each function of a tile in one kernel."""

    @property
    def num_rows(self) -> int:
        return len(self.weight) if self.rows is None else self.rows.count

    @property
    def num_tokens(self) -> int:
        return len(self.hidden)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.input_dtype, torch.float32)

    def token_blocks(self) -> Iterator[slice]:
        for start in range(0, self.num_tokens, self.size.tokens):
            yield slice(start, min(start + self.size.tokens, self.num_tokens))

    def vocabulary_blocks(self) -> Iterator[slice]:
        for start in range(0, self.num_rows, self.size.vocabulary):
            yield slice(start, min(start + self.size.vocabulary, self.num_rows))

    def factors(self, values: Tensor) -> Tensor:
        rounded = values.to(self.input_dtype)
        return rounded.to(self.dtype) if values.device.type == "cpu" else rounded

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply two matrices of `factors`; the sums are float32 or better.

        out: written to if it has the type and the place for it.
        """
        if left.dtype != self.dtype:
            return torch.mm(left, right, out_dtype=self.dtype)
        with self._multiplying(left):
            return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype != total.dtype:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
            return
        with self._multiplying(left):
            total.addmm_(left, right)

    def _multiplying(self, factor: Tensor) -> AbstractContextManager[None]:
        is_rounded = self.input_dtype is torch.bfloat16 and factor.device.type == "cpu"
        return of_rounded_numbers(allowed=is_rounded)

    def tile(self, tokens: Tensor, vocabulary: slice, memory: Tensor | None = None) -> Tile:
        """Return the tile of some tokens, given their hidden states as `factors`.

        memory: [at least the tile's numbers] for the logits; None allocates it.
        """
        weight = self.factors(self.weight[vocabulary])
        out = None
        if memory is not None:
            out = memory[: len(tokens) * len(weight)].view(len(tokens), len(weight))
        is_hole = None if self.rows is None else self.rows.is_hole
        finish = Finish(
            form=self.form,
            temperature=self.temperature,
            bias=None if self.bias is None else self.bias[vocabulary],
            is_hole=None if is_hole is None else is_hole[vocabulary],
        )
        return Tile(weight=weight, products=self.product(tokens, weight.mT, out), finish=finish)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a tile's products, as one kernel if tiles are fused."""
        return run(function, *arguments) if self.is_fused else function(*arguments)

    def memory(self) -> Tensor | None:
        """Return memory for the logits of one tile, to be used again and again.

        None where products have another number type than their factors, and bring their own memory.
        """
        if self.factors(self.hidden[:0]).dtype != self.dtype:
            return None
        tokens = min(self.size.tokens, self.num_tokens)
        rows = min(self.size.vocabulary, self.num_rows)
        return self.hidden.new_empty(tokens * rows, dtype=self.dtype)


@cache
def has_units() -> bool:
    """Return whether this processor multiplies bfloat16 in hardware."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


@contextmanager
def of_rounded_numbers(*, allowed: bool = True) -> Iterator[None]:
    """Multiply float32 matrices of the block as bfloat16, where this processor has units for it.

    PyTorch has no product of bfloat16 numbers with sums in float32 for CPUs, but oneDNN may
    multiply float32 matrices so. Of numbers that bfloat16 holds exactly that changes nothing, and
    with AMX or AVX-512 it is several times faster.

    The setting is the process's: no other thread may multiply meanwhile. allowed: whether the
    block's factors are such that bfloat16 holds them.
    """
    if not (allowed and has_units()):
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
