"""Gradients of matrices as sums of outer products, and products of them with float32 accumulation.

Factors of bfloat16 stay in bfloat16: it takes half of the memory, and matrix units form its
products several times faster than those of float32. A GPU adds up in float32 and returns it. A CPU
returns bfloat16, which is enough for a gradient's last sum; for all else it multiplies float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_CACHED_ELEMENTS = 1 << 19
"""Elements of a product of a batch that stay in a CPU's caches: 2 MiB in float32."""


@dataclass(slots=True, kw_only=True, eq=False)
class Factors:
    """The gradient of a matrix as a sum of outer products over tokens."""

    rows: Tensor
    """[batch, tokens, num_rows], or int64 [batch, tokens] for one-hot rows."""
    columns: Tensor
    """[batch, tokens, num_columns]"""
    matrix: int | None = None
    """Index of the matrix within its parameter; None for a parameter that is one matrix."""

    @property
    def is_one_hot(self) -> bool:
        return not self.rows.is_floating_point()

    def part(self, samples: slice) -> "Factors":
        if samples.start == 0 and samples.stop == self.columns.shape[0]:
            return self
        return replace(self, rows=self.rows[samples], columns=self.columns[samples])

    def inner_products(self, other: "Factors", products: "TokenProducts") -> Tensor:
        """Return inner products [batch] with another factored gradient of the matrix.

        In the number type of the sums of products, or in float64.
        """
        if self.is_one_hot and other.is_one_hot:
            return _one_hot_products(self, other)
        if self.is_one_hot or other.is_one_hot:
            columns = products.of(self.columns, other.columns)
            rows = _row_products(self.rows, other.rows).to(columns.dtype)
            return _sums_of_products(rows, columns)
        if self.rows.shape[-1] < self.columns.shape[-1]:
            return _bilinear(token_products(self.rows, other.rows), self.columns, other.columns)
        return _bilinear(products.of(self.columns, other.columns), self.rows, other.rows)

    def full(self, num_rows: int) -> Tensor:
        """Return the full gradients, [batch, num_rows, num_columns]."""
        if self.rows.is_floating_point():
            return product(self.rows.mT, self.columns)
        count, num_columns = len(self.rows), self.columns.shape[-1]
        offsets = torch.arange(count, device=self.rows.device)[:, None] * num_rows
        flat = self.columns.new_zeros(count * num_rows, num_columns)
        flat.index_add_(0, (self.rows + offsets).flatten(), self.columns.flatten(0, 1))
        return flat.view(count, num_rows, num_columns)

    def add_weighted_to(
        self, total: Tensor, coefficients: Tensor, *, is_complete: bool = False
    ) -> None:
        """Add sum_i c_i G_i to `total`, as one product over all tokens.

        total: of the parameter's shape. coefficients: [batch, 1, 1]
        is_complete: whether nothing that is added later cancels it, so that it may be rounded as a
            plain backward pass rounds it.
        """
        total = total if self.matrix is None else total[self.matrix]
        factor = coefficients.to(total.dtype)
        rows, columns = self.rows, self.columns
        if not rows.is_floating_point():
            columns = _scale(columns, factor, total.dtype)
            total.index_add_(0, rows.flatten(), columns.flatten(0, 1))
            return
        # A sum that is not complete keeps its digits on a CPU.
        dtype = rows.dtype if rows.is_cuda or is_complete else total.dtype
        if rows.shape[-1] < columns.shape[-1]:
            rows = _scale(rows, factor, dtype)
        else:
            columns = _scale(columns, factor, dtype)
        _add_product(total, rows.flatten(0, 1).T, columns.flatten(0, 1))

    def add_each_to(self, totals: Sequence[Tensor], coefficients: Tensor) -> None:
        """Add sum_i c_i G_i of each of several matrices to its total, which is complete then.

        totals: each of the parameter's shape; the factors have the trajectories of one matrix after
            those of another. coefficients: [batch, 1, 1]
        """
        if len(totals) == 1:
            self.add_weighted_to(totals[0], coefficients, is_complete=True)
            return
        count = len(totals)
        rows, columns = (
            each.view(count, -1, *each.shape[1:]) for each in (self.rows, self.columns)
        )
        rows = _scale(rows, coefficients.to(totals[0].dtype), rows.dtype)
        found = product(rows.flatten(1, 2).mT, columns.flatten(1, 2))
        torch._foreach_add_([*totals], [*found.unbind()])


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors as one, which of a single one is itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)


@dataclass(slots=True, eq=False)
class TokenProducts:
    """Products of tokens with tokens; keeps the last one, as neighboring layers share inputs."""

    _last: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        """Return [batch, tokens of first, tokens of second]; both are [batch, tokens, features]."""
        last = self._last
        if last is not None and is_same(first, last[0]) and is_same(second, last[1]):
            return last[2]
        # The factors are held too, so that no other tensor can reuse their memory.
        found = token_products(first, second)
        self._last = (first, second, found)
        return found


def as_factor(values: Tensor, dtype: torch.dtype, precise: torch.dtype) -> Tensor:
    """Return one factor of a product, rounded to what the forward pass multiplied.

    dtype: of the module's output. precise: of sums of products, float32 or better.
    """
    values = values.to(dtype)
    return values if _is_short(values) else values.to(precise)


def token_products(first: Tensor, second: Tensor) -> Tensor:
    """Return inner products [batch, T, S] of tokens of [batch, T, k] and [batch, S, k].

    In float32 or better. A CPU widens factors of bfloat16 for it, a few trajectories at a time, so
    that what it widens stays in its caches and is no new memory of the size of the batch.
    """
    if first.is_cuda or not (_is_short(first) and _is_short(second)):
        return product(first, second.mT)
    products = first.new_empty(len(first), first.shape[1], second.shape[1], dtype=torch.float32)
    size = max(1, _CACHED_ELEMENTS // max(1, 2 * first[0].numel()))
    for start in range(0, len(first), size):
        part = slice(start, start + size)
        wide = first[part].float()
        other = wide if is_same(first, second) else second[part].float()
        torch.bmm(wide, other.mT, out=products[part])
    return products


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the matrix product of [batch, n, k] and [batch, k, m] in float32 or better."""
    if first.is_cuda and _is_short(first) and _is_short(second):
        return torch.bmm(first, second, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype) @ second.to(dtype)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add the matrix product of [n, k] and [k, m] to `total`, which is float32 or better.

    A CPU has no product of bfloat16 that returns float32: it rounds the product's sums.
    """
    if not (_is_short(first) and _is_short(second)):
        total.addmm_(first.to(total.dtype), second.to(total.dtype))
    elif first.is_cuda:
        torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
    else:
        total.add_(first @ second)


def _scale(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(values, factor, out=values.new_empty(values.shape, dtype=dtype))


def _is_short(values: Tensor) -> bool:
    return values.dtype in (torch.bfloat16, torch.float16)


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    if first.is_floating_point():
        return first.gather(2, second[:, None, :].expand(-1, first.shape[1], -1))
    return _row_products(second, first).mT


def _one_hot_products(first: Factors, second: Factors) -> Tensor:
    """Products [batch] float64 of two gradients whose rows are one-hot.

    Columns of equal tokens are added up first, so the work grows with the tokens and not with their
    square.
    """
    batch = len(first.rows)
    numbers = torch.arange(batch, device=first.rows.device)[:, None]
    tokens = torch.cat([first.rows, second.rows], dim=1)
    keys, places = torch.unique(tokens * batch + numbers, return_inverse=True)
    width = first.rows.shape[1]
    total = _add_up(first.columns, places[:, :width], len(keys))
    other = total if second is first else _add_up(second.columns, places[:, width:], len(keys))
    products: Tensor = torch.linalg.vecdot(total, other).double()
    return products.new_zeros(batch).index_add_(0, keys % batch, products)


def _add_up(columns: Tensor, places: Tensor, count: int) -> Tensor:
    total = columns.new_zeros(count, columns.shape[2])
    return total.index_add_(0, places.flatten(), columns.flatten(0, 1))


def _bilinear(kernel: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """sum_ts k_ts a_t . b_s of each trajectory, [batch].

    kernel: [batch, T, S]; first, second: [batch, T or S, features].

    A CPU multiplies the kernel with b, into memory that stays in its caches: the whole batch at
    once where it is small, else one trajectory at a time. Products of a with b would need a
    transposition first. A GPU, and a CPU with factors of bfloat16, compute the whole batch at once.
    """
    if kernel.device.type != "cpu" or _is_short(first):
        return _sums_of_products(kernel, token_products(first, second))
    if first.numel() <= _CACHED_ELEMENTS:
        together: Tensor = torch.linalg.vecdot((kernel @ second).flatten(1), first.flatten(1))
        return together
    moved = torch.empty_like(first[0], memory_format=torch.contiguous_format)
    sums = [
        torch.dot(torch.mm(k, b, out=moved).view(-1), a.reshape(-1))
        for k, a, b in zip(kernel, first, second, strict=True)
    ]
    return torch.stack(sums)


def _sums_of_products(first: Tensor, second: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vecdot(first.flatten(1), second.flatten(1))
    return found


def is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )
