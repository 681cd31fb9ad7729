"""The device that a learner computes on."""

from collections.abc import Mapping, MutableMapping
from typing import Final

import torch
from torch import Tensor

_ALLOCATOR_VARIABLES: Final = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Those that set up the allocator; PyTorch 2.11 to 2.13 read both."""


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch's allocator of a GPU extend its segments, unless the user has set it up.

    Micro-batches differ in length, and segments of fixed sizes then leave holes that nothing fits.
    To be called before the process uses its GPU.
    """
    if not _ALLOCATOR_VARIABLES & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


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


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; nobody waits until a GPU has it.

    The copy is from page-locked memory, which PyTorch keeps until the copy is done: from other
    memory a copy waits for all that the GPU was given before.
    """
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


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
