"""Starts vLLM with the settings of a rollout group."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.async_llm import AsyncLLM

from vcpo.api.workloads import KvCache, Lora, Model, RolloutGroup
from vcpo.service.lifecycle import gpu_memory_ratio
from vcpo.service.rotary_table import table_length
from vcpo_rollout.engines.adapters import SERVED_RANKS
from vcpo_rollout.engines.engine import EngineSetting
from vcpo_rollout.engines.loading import load_model_skeleton
from vcpo_rollout.engines.vllm import ROLLOUT_WORKER_VARIABLE
from vcpo_rollout.engines.vllm.last_error import LastError
from vcpo_rollout.engines.weight_plan import Device

_ARGUMENTS_LOGGER: Final = logging.getLogger("vllm.engine.arg_utils")
_GIBIBYTE: Final = 1 << 30
_CPU_KV_CACHE_GIBIBYTES: Final = 1.0
_WORKER_MODULE: Final = "vcpo_rollout.engines.vllm.worker"

_ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # a run reports nothing to third parties
    "DO_NOT_TRACK": "1",
    # A fork would copy locks that other threads of this process hold.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_CPU_ENVIRONMENT: Final = {
    # Several workers share a machine, and all would bind to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Eager decoding compiles only one small log-probability function, which takes many seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_ONE_PROCESS_ON_CPU: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Path of the executor: vLLM replaces the name `uni` with one that needs another process."""
_ROUTES_ENVIRONMENT: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Only this runner returns the experts of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """A rollout group's settings for vLLM."""

    model: Model
    """vLLM reads its configuration, and its parameters if it serves adapters."""
    group: RolloutGroup
    seed: int
    gpu_memory_ratio: float | None = None
    """Largest share of a GPU's memory for weights, keys and values together; None is vLLM's
    default, nine tenths."""
    online_quantization: str | None = None
    """As in `EngineSetting`."""
    serves_adapters: bool = False
    """As in `EngineSetting`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The user's other arguments of vLLM's `AsyncEngineArgs`, by name."""
    finds_stop_strings: bool = False
    """Whether vLLM reads the tokenizer, to find strings that end a response."""
    returns_routes: bool = False
    """Whether responses carry the experts that computed their tokens."""
    architecture: str | None = None
    """Class of the model that is trained; None if the model's configuration names it."""
    is_recurrent: bool = False
    """Whether the model has layers with a recurrent state."""

    @property
    def lora(self) -> Lora | None:
        return self.model.lora if self.serves_adapters else None

    @classmethod
    def of(cls, setting: EngineSetting, arguments: Mapping[str, Any]) -> Self:
        """Return those of a rollout group; `arguments` are the user's."""
        return cls(
            model=setting.spec.model,
            group=setting.group,
            seed=setting.seed,
            gpu_memory_ratio=gpu_memory_ratio(),
            online_quantization=setting.online_quantization,
            serves_adapters=setting.serves_adapters,
            arguments=arguments,
            finds_stop_strings=setting.stop_strings is not None,
            returns_routes=setting.spec.algorithm.router_replay,
        )


def vllm_device() -> Device:
    """Return the device on which vLLM computes."""
    capability = current_platform.get_device_capability()
    return Device(
        platform=current_platform.device_name,
        capability=None if capability is None else capability.to_int(),
    )


def load_skeleton(settings: VllmSettings) -> PreTrainedModel:
    """Return the model with its names and shapes in `transformers`, without memory for values."""
    with torch.device("meta"):
        return load_model_skeleton(
            settings.model.name,
            revision=settings.model.revision,
            trust_remote_code=settings.model.trust_remote_code,
            precision=settings.group.number_format,
        )


def for_model(settings: VllmSettings, skeleton: PreTrainedModel) -> VllmSettings:
    """Return the settings with what vLLM must be told of the model.

    vLLM chooses LongRoPE's factors by its longest sequence, which is by default the length of
    pretraining. Its table of dynamic NTK ends with the model's context, its default beyond it.
    Of a checkpoint with other inputs it would run the whole, whose modules have other names than
    those of the language model that is trained: it drops adapters of names that it does not know.

    Raises: ValueError if recurrent states would outlive their version.
    """
    config, name = skeleton.config, type(skeleton).__name__
    layers = DynamicCache(config=config).layers
    is_recurrent = any(isinstance(each, LinearAttentionCacheLayerMixin) for each in layers)
    if is_recurrent and settings.group.kv_cache is KvCache.KEEP:
        raise ValueError(
            f"spec.rollouts[].kvCache: keep, but {name} has layers with a recurrent state, which"
            " mixes all versions since a sequence began; use recompute"
        )
    length = table_length(config, settings.group.max_model_len) or settings.group.max_model_len
    return replace(
        settings,
        group=settings.group.model_copy(update={"max_model_len": length}),
        architecture=None if name in (config.architectures or ()) else name,
        is_recurrent=is_recurrent,
    )


def start_llm(settings: VllmSettings, last_error: LastError | None = None) -> AsyncLLM:
    """Start vLLM, its parameters uninitialized unless it serves adapters.

    last_error: where vLLM's processes write their errors; None if nobody wants them.

    Returns once it can generate.
    """
    if settings.returns_routes and not HAS_TRITON:
        raise ValueError(
            "spec.algorithm.routerReplay: true, but vLLM says which experts it used only with"
            " Triton, which a CPU does not have; use spec.rollouts[].engine: hf, or false"
        )
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _ARGUMENTS_LOGGER.addFilter(_is_no_warning_of_whole_prompts)
    variables = _ENVIRONMENT | {ROLLOUT_WORKER_VARIABLE: str(os.getpid())}
    last_error = last_error or LastError()
    variables |= last_error.environment
    if settings.returns_routes:
        variables |= _ROUTES_ENVIRONMENT
    try:
        arguments = AsyncEngineArgs(**engine_arguments(settings, on_cpu=on_cpu))
        with _environment(variables | (_CPU_ENVIRONMENT if on_cpu else {})):
            return AsyncLLM.from_engine_args(arguments)
    except Exception as error:  # the code of any model runs there
        cause = last_error.read() or error
        given = f" with engineArguments {dict(settings.arguments)}" if settings.arguments else ""
        raise ValueError(f"spec.rollouts[].engine: vLLM did not start{given}: {cause}") from error


def _is_no_warning_of_whole_prompts(record: logging.LogRecord) -> bool:
    return "disabling chunked prefill" not in record.getMessage()


def engine_arguments(settings: VllmSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the settings as arguments of vLLM's `AsyncEngineArgs`."""
    kv_cache_gibibytes = settings.group.kv_cache_gibibytes
    if kv_cache_gibibytes is None and on_cpu:
        kv_cache_gibibytes = _CPU_KV_CACHE_GIBIBYTES
    arguments = {
        "model": settings.model.name,
        "revision": settings.model.revision,
        "trust_remote_code": settings.model.trust_remote_code,
        "dtype": settings.group.number_format.value,
        "quantization": settings.online_quantization,
        "seed": settings.seed,
        "max_num_seqs": settings.group.max_concurrent_sequences,
        # -1 is as long as the memory for keys and values allows.
        "max_model_len": settings.group.max_model_len or -1,
        "tensor_parallel_size": settings.group.tensor_parallel_size,
        "load_format": "dummy",  # the learner sends every parameter
        "skip_tokenizer_init": not settings.finds_stop_strings,
        # Of the distribution that tokens are drawn from, after temperature.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend="vcpo"),
        "worker_extension_cls": f"{_WORKER_MODULE}.WorkerExtension",
        "disable_log_stats": True,
    }
    if settings.lora is not None:
        arguments |= {
            "load_format": "safetensors",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in SERVED_RANKS if rank >= settings.lora.rank),
            # A layer that gets no adapter takes none: vLLM would multiply with zeros.
            "lora_target_modules": list(settings.lora.target_modules) or None,
        }
    if settings.gpu_memory_ratio is not None and not on_cpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_ratio
    if kv_cache_gibibytes is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gibibytes * _GIBIBYTE)
    if settings.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if on_cpu:
        arguments["enforce_eager"] = True
        # vLLM dies if a seeded request's prompt is read in pieces: it then turns the request's
        # generator back, which one for a CPU cannot do. Whole prompts wait for the next step.
        arguments["enable_chunked_prefill"] = False
        if settings.is_recurrent:  # vLLM caches their prefixes by chunks
            arguments["enable_prefix_caching"] = False
        if settings.group.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = _ONE_PROCESS_ON_CPU
    arguments |= settings.arguments
    if settings.architecture is not None:
        trained = {"architectures": [settings.architecture]}
        arguments["hf_overrides"] = (arguments.get("hf_overrides") or {}) | trained
    return arguments


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start in the body; the user's have priority."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
