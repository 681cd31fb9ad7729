"""Squares and sums of trajectories' gradients, which a kernel of Triton reads from memory once.

PyTorch reads a large gradient three times: for its norm, for the sum weighted by offsets, and for
its group's sum. The kernel adds up in float32 as PyTorch does, squares of blocks in float64, and in
the same order each time. PyTorch for GPUs brings Triton; elsewhere this module cannot be imported.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Elements of a gradient that one program of the kernel has."""


def add_and_square(
    gradients: Tensor, weights: Tensor, weighted: Tensor | None, by_group: Tensor
) -> Tensor:
    """Add gradients to their sums in place; return their squared norms, [samples] float64.

    gradients: [samples, elements] float32.
    weights: [1 + groups, samples] float32: the offsets; then 1 for those in a group, else 0.
    weighted: [elements] the sum weighted by offsets; None if they are 0.
    by_group: [groups, elements] the sum of each group.
    """
    gradients = gradients.contiguous()
    num_samples, num_elements = gradients.shape
    num_blocks = triton.cdiv(num_elements, _BLOCK)
    squares = gradients.new_empty(num_samples, num_blocks)
    _kernel[(num_blocks,)](
        gradients,
        weights,
        by_group if weighted is None else weighted,
        by_group,
        squares,
        num_elements,
        num_samples,
        len(by_group),
        weights.stride(0),
        by_group.stride(0),
        HAS_OFFSETS=weighted is not None,
        BLOCK=_BLOCK,
    )
    return squares.sum(dim=1, dtype=torch.float64)


# ruff: noqa: ANN001, N803 - Triton's compiler gives a kernel's arguments their types
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    gradients,
    weights,
    weighted,
    by_group,
    squares,
    num_elements,
    num_samples,
    num_groups,
    weights_stride,
    group_stride,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < num_elements
    total = tl.zeros([BLOCK], tl.float32)
    # Rows are walked by their pointer: the index of an element may need more than 32 bits.
    row = gradients + at
    for sample in range(num_samples):
        values = tl.load(row, mask=is_inside, other=0.0)
        tl.store(squares + sample * tl.num_programs(0) + block, tl.sum(values * values, axis=0))
        total += tl.load(weights + sample) * values
        row += num_elements
    if HAS_OFFSETS:
        place = weighted + at
        tl.store(place, tl.load(place, mask=is_inside) + total, mask=is_inside)
    place = by_group + at
    for group in range(num_groups):
        own = weights + (group + 1) * weights_stride
        total = tl.zeros([BLOCK], tl.float32)
        row = gradients + at
        for sample in range(num_samples):
            # A block of all samples is small, so it is in a cache.
            values = tl.load(row, mask=is_inside, other=0.0)
            total += tl.load(own + sample) * values
            row += num_elements
        tl.store(place, tl.load(place, mask=is_inside) + total, mask=is_inside)
        place += group_stride
