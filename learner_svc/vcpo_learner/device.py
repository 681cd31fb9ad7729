"""The device that a learner computes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that new tensors can have; None for a CPU.

    A process that shares its GPU may have less than the GPU has
    (`torch.cuda.set_per_process_memory_fraction`).
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    # What PyTorch's allocator holds without a tensor in it can be had too.
    unused = free + torch.cuda.memory_reserved(device) - allocated
    own = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return max(0, min(unused, own))


def computes(device: torch.device) -> bool:
    """Return whether a device computes: after some errors a GPU does not, for the same process."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError:
        return False


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's random generators, of the CPU and of a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue PyTorch's random generators from `random_states`, of this kind of device or not."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
