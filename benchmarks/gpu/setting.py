"""Where checks run, how large they are, and how they measure."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
Figures = Iterator[Mapping[str, Any]]
"""Parts of a check's line, in the order in which they become known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device, whether sizes are those of a test, and whether the first figures are enough."""

    device: torch.device
    is_tiny: bool
    is_quick: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def precision(self) -> str:
        return "bfloat16" if self.is_gpu else "float32"

    def choose(self, full: _T, tiny: _T) -> _T:
        return tiny if self.is_tiny else full

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, repeats: int = 5) -> float:
        """Run something once unmeasured, and return the median of its wall-clock seconds."""
        work()
        found = []
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - started)
        return median(found)

    def forget(self) -> None:
        """Free what nobody holds, and let the peak of memory start from what is held."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Largest memory of tensors since `forget`, GiB; None on a CPU."""
        if not self.is_gpu:
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 3)

    def matmul_flops(self) -> float:
        """Multiplications and additions per second in one large product of `dtype`."""
        size = self.choose(8192, 256)
        left = torch.randn(size, size, device=self.device, dtype=self.dtype)
        return 2.0 * size**3 / self.seconds(lambda: left @ left)


def milliseconds(seconds: float) -> float:
    """Return seconds in milliseconds, as lines show them."""
    return round(1e3 * seconds, 3)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of two tensors over the length of the second."""
    wanted = expected.double()
    return float((found.double() - wanted).norm() / wanted.norm())
