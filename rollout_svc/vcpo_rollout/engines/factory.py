"""Makes the engine that a rollout group asks for, and decides what becomes of weights before it."""

import difflib
import inspect
import logging
import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import EngineName, Quantization, RolloutGroup
from vcpo.service.plugins import beside_or_in, import_named, require_arguments, require_class
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import Engine, EngineClass, EngineSetting
from vcpo_rollout.engines.loading import load_end_token_ids, load_tokenizer
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.weight_plan import WeightPlan, decide

_LOGGER = logging.getLogger(__name__)
_SHIPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        EngineName.HF: "vcpo_rollout.engines.hf.engine:HfEngine",
        EngineName.VLLM: "vcpo_rollout.engines.vllm.engine:VllmEngine",
    }
)
_FIX_OF_VLLM: Final = "pip install 'vcpo[rollout]' with a GPU; without one, engine: hf"
_METHODS: Final = ("load", "generate", "swap_weights", "close")
"""The methods that an engine's class must have."""
_PROPERTIES: Final = ("policy_version", "context_tokens", "end_token_ids", "stop_strings")
_VLLM_LOGGING: Final = Path(__file__).parent / "vllm" / "logging.json"
"""Configuration of vLLM's loggers, in the form of `logging.config.dictConfig`."""


def plan_weights(spec: VCPORunSpec, group: RolloutGroup) -> WeightPlan:
    """Decide what becomes of versions on this machine; log each decision and its reason."""
    lora, device = spec.model.lora, None
    needs_device = lora is not None or group.quantization is not Quantization.NONE
    if group.engine_name == EngineName.VLLM and needs_device:
        find_engine(spec, group)  # it says what to do if vLLM is missing
        from vcpo_rollout.engines.vllm.start import vllm_device

        device = vllm_device()
    plan = decide(lora, group, device)
    for reason in plan.reasons:
        _LOGGER.info("%s", reason)
    return plan


def load_engine(
    spec: VCPORunSpec,
    group: RolloutGroup,
    plan: WeightPlan,
    *,
    seed: int,
    today: date | None = None,
) -> tuple[Engine, PromptCodec]:
    """Make a group's engine, and the codec of its prompts.

    seed: seeds the sampling; every worker has its own.
    today: day on which the run began, for templates that write a date.
    """
    engine_class = find_engine(spec, group)
    name, revision = spec.model.name, spec.model.revision
    tokenizer = load_tokenizer(
        name, revision=revision, trust_remote_code=spec.model.trust_remote_code
    )
    environment = spec.environment
    codec = PromptCodec(
        tokenizer,
        environment.prompt_format,
        environment.system_prompt,
        template_arguments=environment.template_arguments,
        plain_control_tokens=environment.plain_control_tokens,
        today=today,
    )
    setting = EngineSetting(
        spec=spec,
        group=group,
        tokenizer=tokenizer,
        end_token_ids=load_end_token_ids(name, tokenizer, codec.turn_end_ids, revision=revision),
        stop_strings=StopStrings.of(spec.sampling, tokenizer),
        seed=seed,
        online_quantization=plan.online_method,
        serves_adapters=plan.adapters is AdapterUse.SERVED,
    )
    return _load(engine_class, setting), codec


def _load(engine_class: EngineClass, setting: EngineSetting) -> Engine:
    """Make an engine from a class."""
    group = setting.group
    field, name = _field(setting.spec, group), group.engine_name
    try:
        engine = engine_class.load(setting=setting, **group.engine_arguments)
    except (OSError, ValueError):
        raise
    except (Exception, SystemExit) as error:
        if name in _SHIPPED:
            raise
        raise ValueError(
            f"{field}: {name!r} cannot be loaded ({type(error).__name__}: {error}); correct the"
            " class or engineArguments"
        ) from error
    if lacking := _lacking(engine):
        raise ValueError(
            f"{field}: {name!r}: `load` returned {engine!r:.100}, which has no"
            f" {', no '.join(lacking)}; it must return an engine"
            " (`vcpo_rollout.engines.engine.Engine`)"
        )
    return engine


def _lacking(loaded: object) -> list[str]:
    missing = [each for each in _PROPERTIES if not hasattr(loaded, each)]
    return missing + [
        f"async {each}"
        for each in _METHODS[1:]
        if not inspect.iscoroutinefunction(getattr(loaded, each, None))
    ]


def find_engine(spec: VCPORunSpec, group: RolloutGroup) -> EngineClass:
    """Import the class of a group's engine, and check its methods and its arguments' names."""
    field, name = _field(spec, group), group.engine_name
    fix = beside_or_in("rollout")
    if name == EngineName.VLLM:
        fix = _FIX_OF_VLLM
        _configure_logging_of_vllm()
    found = import_named(_SHIPPED.get(name, name), field=field, fix=fix, name=name)
    engine_class = require_class(found, field=field, name=name, what="an engine", methods=_METHODS)
    if inspect.ismethod(load := getattr(engine_class, "load", None)):
        require_arguments(
            load,
            group.engine_arguments,
            beside=("setting",),
            field=f"{field}Arguments",
            name=name,
        )
        if name == EngineName.VLLM:
            _check_names_of_vllm(group, f"{field}Arguments")
        return cast("EngineClass", engine_class)
    raise ValueError(f"{field}: {name!r}: its `load` must be a class method")


def _check_names_of_vllm(group: RolloutGroup, field: str) -> None:
    from vllm import AsyncEngineArgs

    known = inspect.signature(AsyncEngineArgs).parameters
    for name in group.engine_arguments.keys() - known.keys():
        likely = " or ".join(map(repr, difflib.get_close_matches(name, known))) or "another name"
        raise ValueError(f"{field}.{name}: vLLM has no such argument; write {likely}, or remove it")


def _field(spec: VCPORunSpec, group: RolloutGroup) -> str:
    return f"spec.rollouts[{spec.rollouts.index(group)}].engine"


def _configure_logging_of_vllm() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_LOGGING))
