"""Products of bfloat16 numbers on a CPU, with sums in float32.

PyTorch has no such product for CPUs, but oneDNN may multiply float32 matrices as bfloat16 and add
up in float32. Of numbers that bfloat16 holds exactly that changes nothing, and on processors with
units for it (AMX, AVX-512) it is several times faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def has_units() -> bool:
    """Return whether this processor multiplies bfloat16 in hardware."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


@contextmanager
def of_rounded_numbers(*, allowed: bool = True) -> Iterator[None]:
    """Multiply float32 matrices of the block as bfloat16, where this processor has units for it.

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
