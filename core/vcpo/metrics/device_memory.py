"""Memory of a GPU, as PyTorch's allocator of this process counts it."""

from collections.abc import Mapping
from typing import Any

from vcpo.metrics.label_values import MemoryState


def device_memory(cuda: Any, device: Any) -> Mapping[MemoryState, int] | None:
    """Return bytes of a GPU by state; None for a CPU. It asks PyTorch and not the device.

    cuda, device: `torch.cuda` and a `torch.device`; this package does without PyTorch.
    """
    if device.type != "cuda":
        return None
    return {
        MemoryState.RESERVED: cuda.memory_reserved(device),
        MemoryState.PEAK: cuda.max_memory_allocated(device),
        MemoryState.TOTAL: cuda.get_device_properties(device).total_memory,
    }
