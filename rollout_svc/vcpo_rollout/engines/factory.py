"""Makes the engine that a rollout group asks for, and decides what becomes of weights before it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from vcpo.service.lifecycle import gpu_memory_ratio
from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import EngineName, Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterPlan, AdapterUse, plan_adapters
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import Engine
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.engines.loading import load_end_token_ids, load_model_skeleton, load_tokenizer
from vcpo_rollout.engines.quantization import QuantizationPlan, plan_quantization
from vcpo_rollout.engines.stop_strings import StopStrings

_LOGGER = logging.getLogger(__name__)
_VLLM_LOGGING = Path(__file__).parent / "vllm" / "logging.json"
"""Configuration of vLLM's loggers, in the form of `logging.config.dictConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What becomes of a version in a worker: who quantizes it, and who applies adapters."""

    quantization: QuantizationPlan
    adapters: AdapterPlan | None
    """None for a run without adapters."""

    @property
    def served_adapters(self) -> bool:
        """Whether the engine applies adapters beside its base model."""
        return self.adapters is not None and self.adapters.use is AdapterUse.SERVED


def plan_weights(spec: VCPORunSpec, group: RolloutGroup) -> WeightPlan:
    """Decide what becomes of versions on this machine; log each decision and its reason.

    Raises:
        ValueError: when the group asks for vLLM and it is not installed.
    """
    lora = spec.model.lora
    quantizes = group.quantization is not Quantization.NONE
    device = None
    if group.engine is EngineName.VLLM and (quantizes or lora is not None):
        with _require_vllm():
            from vcpo_rollout.engines.vllm.start import vllm_device
        device = vllm_device()
    quantization = plan_quantization(group.quantization, precision=group.precision, device=device)
    if quantizes:
        _LOGGER.info("quantization: %s", quantization)
    adapters = None
    if lora is not None:
        adapters = plan_adapters(lora, group, rounding=quantization.rounding, device=device)
        _LOGGER.info("adapters: %s", adapters)
    return WeightPlan(quantization=quantization, adapters=adapters)


def load_engine(
    spec: VCPORunSpec,
    group: RolloutGroup,
    plan: WeightPlan,
    *,
    seed: int,
    today: date | None = None,
) -> tuple[Engine, PromptCodec]:
    """Start a group's engine, and make the codec of its prompts.

    seed: seeds the sampling; every worker has its own.
    today: day on which the run began, for templates that write a date.

    Raises:
        ValueError: when the model does not exist, or the engine cannot run it on this machine.
    """
    name, revision = spec.model.name, spec.model.revision
    tokenizer = load_tokenizer(
        name, revision=revision, trust_remote_code=spec.model.trust_remote_code
    )
    environment = spec.environment
    codec = PromptCodec(
        tokenizer,
        environment.prompt_format,
        environment.system_prompt,
        plain_control_tokens=environment.plain_control_tokens,
        today=today,
    )
    end_token_ids = load_end_token_ids(name, tokenizer, revision=revision)
    if group.engine is EngineName.VLLM:
        return _start_vllm(spec, group, plan, tokenizer, end_token_ids, seed), codec
    return _start_hf(spec, group, tokenizer, end_token_ids, seed), codec


def _start_hf(
    spec: VCPORunSpec,
    group: RolloutGroup,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: frozenset[int],
    seed: int,
) -> Engine:
    if group.threads is not None:
        torch.set_num_threads(group.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and (ratio := gpu_memory_ratio()) is not None:
        torch.cuda.set_per_process_memory_fraction(ratio)
    pad_token_id = tokenizer.pad_token_id
    return HfEngine(
        load_model_skeleton(
            spec.model.name,
            revision=spec.model.revision,
            trust_remote_code=spec.model.trust_remote_code,
            precision=group.precision,
            context_tokens=spec.context_tokens,
        ),
        end_token_ids=end_token_ids,
        pad_token_id=pad_token_id if isinstance(pad_token_id, int) else min(end_token_ids),
        max_concurrent_sequences=group.max_concurrent_sequences,
        seed=seed,
        device=device,
        precision=group.precision,
        stop_strings=StopStrings.of(spec.sampling, tokenizer),
        returns_routes=spec.algorithm.router_replay,
        max_model_len=group.max_model_len,
    )


def _start_vllm(
    spec: VCPORunSpec,
    group: RolloutGroup,
    plan: WeightPlan,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: frozenset[int],
    seed: int,
) -> Engine:
    with _require_vllm():
        from vcpo_rollout.engines.vllm.engine import VllmEngine
        from vcpo_rollout.engines.vllm.start import VllmSettings
    settings = VllmSettings(
        model_name=spec.model.name,
        revision=spec.model.revision,
        trust_remote_code=spec.model.trust_remote_code,
        precision=group.precision,
        max_concurrent_sequences=group.max_concurrent_sequences,
        seed=seed,
        kv_cache_gibibytes=group.kv_cache_gibibytes,
        online_quantization=plan.quantization.online_method,
        lora=spec.model.lora if plan.served_adapters else None,
        tensor_parallel_size=group.tensor_parallel_size,
        max_model_len=group.max_model_len,
        arguments=group.engine_arguments,
        gpu_memory_ratio=gpu_memory_ratio(),
        returns_routes=spec.algorithm.router_replay,
    )
    return VllmEngine.start(
        settings,
        end_token_ids=end_token_ids,
        stop_strings=StopStrings.of(spec.sampling, tokenizer),
    )


@contextmanager
def _require_vllm() -> Iterator[None]:
    """Import vLLM in the body; a failed import becomes an error with a cure.

    vLLM configures its loggers when an engine starts, in its processes too: here, to write lines as
    ours. At its default level it logs three lines per swap, so the level is WARNING unless the user
    sets another.

    Raises:
        ValueError: when vLLM cannot be imported.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_LOGGING))
    try:
        yield
    except (ImportError, RuntimeError) as error:  # RuntimeError: of an incompatible torchvision
        raise ValueError(
            f"spec.rollouts[].engine: vllm cannot be loaded here ({error}). Cure: pip install "
            "'vcpo[rollout]' with a GPU; without one see docs/design/032-vllm-engine.md; or "
            "engine: hf"
        ) from error
