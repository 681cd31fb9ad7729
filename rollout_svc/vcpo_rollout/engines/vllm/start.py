"""How vLLM is started: what a rollout group asks for, in vLLM's terms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from vcpo.spec.workloads import Precision
from vcpo_rollout.engines.loading import load_model_skeleton
from vcpo_rollout.engines.quantization import Device

_GIBIBYTE: Final = 1 << 30
_CPU_KV_CACHE_GIBIBYTES: Final = 1.0
_WORKER_MODULE: Final = "vcpo_rollout.engines.vllm.worker"

_ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # a run tells nobody what it does
    "DO_NOT_TRACK": "1",
    # A fork would copy the locks of the threads that we have by now.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_CPU_ENVIRONMENT: Final = {
    # Several workers share a machine; bound to cores, all of them would choose the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Eager decoding compiles one small function of the log-probabilities only, for many seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_CPU_ARGUMENTS: Final[Mapping[str, Any]] = {
    "enforce_eager": True,
    # By its path: vLLM would replace the name `uni` by an executor with one more process.
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What a rollout group asks of vLLM."""

    model_name: str
    """A directory or a model name on the Hugging Face hub; only its configuration is read."""
    revision: str | None
    precision: Precision
    max_concurrent_sequences: int
    seed: int
    kv_cache_gibibytes: float | None
    """Room for keys and values; None is nine tenths of a GPU, or 1 GiB of a CPU's memory."""
    gpu_memory_ratio: float | None = None
    """Largest share of a GPU's memory for weights, keys and values together; None is vLLM's own
    choice, nine tenths."""
    online_quantization: str | None = None
    """What vLLM quantizes weights to as it loads them, by its name; None is nothing."""


def vllm_device() -> Device:
    """What vLLM would compute on."""
    capability = current_platform.get_device_capability()
    return Device(
        platform=current_platform.device_name,
        capability=None if capability is None else capability.to_int(),
    )


def load_skeleton(settings: VllmSettings) -> PreTrainedModel:
    """The model's names and shapes as `transformers` has them, without memory for the numbers.

    Raises:
        ValueError: naming `spec.model.name`, when there is no such model or it does not generate.
    """
    with torch.device("meta"):
        return load_model_skeleton(
            settings.model_name, revision=settings.revision, precision=settings.precision
        )


def start_llm(settings: VllmSettings) -> AsyncLLM:
    """Start vLLM with meaningless parameters; returns when it could generate.

    Raises:
        ValueError: when vLLM cannot run this model here; its log says more.
    """
    on_cpu = current_platform.is_cpu()
    arguments = AsyncEngineArgs(**engine_arguments(settings, on_cpu=on_cpu))
    try:
        with _environment(_ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu else {})):
            return AsyncLLM.from_engine_args(arguments)
    except RuntimeError as error:
        raise ValueError(f"spec.rollouts[].engine: vLLM did not start: {error}") from error


def engine_arguments(settings: VllmSettings, *, on_cpu: bool) -> dict[str, Any]:
    """The settings as arguments of vLLM's `AsyncEngineArgs`."""
    kv_cache_gibibytes = settings.kv_cache_gibibytes
    if kv_cache_gibibytes is None and on_cpu:
        kv_cache_gibibytes = _CPU_KV_CACHE_GIBIBYTES
    arguments = {
        "model": settings.model_name,
        "revision": settings.revision,
        "dtype": settings.precision.value,
        "quantization": settings.online_quantization,
        "seed": settings.seed,
        "max_num_seqs": settings.max_concurrent_sequences,
        "max_model_len": -1,  # the longest that the room for keys and values allows
        "load_format": "dummy",  # the learner sends every parameter
        "skip_tokenizer_init": True,
        # Of the distribution that is sampled from: after temperature.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend="vcpo"),
        "worker_extension_cls": f"{_WORKER_MODULE}.WorkerExtension",
        "disable_log_stats": True,
    }
    if settings.gpu_memory_ratio is not None and not on_cpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_ratio
    if kv_cache_gibibytes is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gibibytes * _GIBIBYTE)
    return arguments | dict(_CPU_ARGUMENTS if on_cpu else {})


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Around the start of processes: variables for them, where the user has set none."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
