"""The device that a learner computes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a GPU in bytes, as PyTorch's allocator counts it."""

    allocated: int
    reserved: int
    peak: int
    """Most memory allocated since the process started."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU. It asks PyTorch and not the device."""
    if device.type != "cuda":
        return None
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )


def computes(device: torch.device) -> bool:
    """Return whether a device computes: after some errors a GPU does not, for the same process."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError:
        return False
