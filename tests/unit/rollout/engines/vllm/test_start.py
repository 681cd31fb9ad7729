"""How vLLM is started: what settings become arguments, and which are refused."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, Qwen3_5Config
from vllm import AsyncEngineArgs
from vllm.triton_utils import HAS_TRITON

from tests.fixtures.families import HYBRIDS, family
from tests.unit.rollout.engines.vllm.tiny_vllm import save_settings
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import KvCache, Model, Precision, RolloutGroup
from vcpo_rollout.engines.factory import find_engine
from vcpo_rollout.engines.vllm.start import VllmSettings, engine_arguments, for_model, start_llm


def test_the_users_arguments_reach_vllm(tmp_path):
    arguments = {"block_size": 32, "enforce_eager": False}
    settings = save_settings(
        tmp_path, arguments=arguments, tensor_parallel_size=2, max_model_len=4096
    )
    expected = {**arguments, "tensor_parallel_size": 2, "max_model_len": 4096}
    given = engine_arguments(settings, on_cpu=True)
    assert expected.items() <= given.items()
    assert "distributed_executor_backend" not in given


@pytest.mark.parametrize(
    ("kind", "given", "length"),
    [
        ("phi3 longrope", None, 512),
        ("phi3 longrope", 24, 24),
        ("llama dynamic", None, 40),
        ("llama dynamic", 160, 40),
        ("llama", None, None),
        ("llama", 160, 160),
    ],
)
def test_vllm_is_given_the_length_of_a_rotary_table_that_has_one(tmp_path, kind, given, length):
    settings = save_settings(tmp_path, max_model_len=given)
    assert for_model(settings, family(kind)).group.max_model_len == length


SETTINGS = VllmSettings(
    model=Model(name="model"), group=RolloutGroup(name="vllm", precision=Precision.BFLOAT16), seed=7
)


def test_vllm_runs_the_class_that_is_trained_whatever_the_configuration_names():
    text = family("qwen3_5_text").config
    wrapper = Qwen3_5Config(text_config=text.to_dict(), architectures=["Qwen3_5ForConditional"])
    trained = AutoModelForCausalLM.from_config(wrapper)
    settings = replace(SETTINGS, arguments={"hf_overrides": {"rope_theta": 1e6}})
    given = engine_arguments(for_model(settings, trained), on_cpu=False)
    expected = {"rope_theta": 1e6, "architectures": ["Qwen3_5ForCausalLM"]}
    assert given["hf_overrides"] == expected
    AsyncEngineArgs(**given)
    trained.config.architectures = ["Qwen3_5ForCausalLM"]
    assert "hf_overrides" not in engine_arguments(for_model(SETTINGS, trained), on_cpu=False)


@pytest.mark.parametrize(
    ("kind", "caching"), [("llama", None), *dict.fromkeys(HYBRIDS, False).items()]
)
def test_where_prompts_are_read_whole_prefixes_of_recurrent_layers_are_not_cached(kind, caching):
    settings = for_model(SETTINGS, family(kind))
    assert engine_arguments(settings, on_cpu=True).get("enable_prefix_caching") is caching
    assert "enable_prefix_caching" not in engine_arguments(settings, on_cpu=False)


def test_recurrent_states_do_not_outlive_their_version():
    group = SETTINGS.group.model_copy(update={"kv_cache": KvCache.KEEP})
    settings = replace(SETTINGS, group=group)
    assert for_model(settings, family("llama")).group.kv_cache is KvCache.KEEP
    with pytest.raises(ValueError, match=r"^spec\.rollouts\[\]\.kvCache: keep, .*; use recompute"):
        for_model(settings, family("lfm2"))


def test_a_run_that_replays_routes_asks_vllm_for_them():
    asking = engine_arguments(replace(SETTINGS, returns_routes=True), on_cpu=False)
    plain = engine_arguments(SETTINGS, on_cpu=False)
    assert asking == plain | {"enable_return_routed_experts": True}
    AsyncEngineArgs(**asking)


@pytest.mark.skipif(HAS_TRITON, reason="vLLM returns routes here")
def test_without_triton_routes_are_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"routerReplay: true, but .*rollouts\[\]\.engine: hf"):
        start_llm(replace(SETTINGS, returns_routes=True))


def test_a_gpu_is_left_to_vllms_own_choices_but_for_what_makes_numbers_right():
    settings = SETTINGS
    on_gpu = engine_arguments(settings, on_cpu=False)
    assert "gpu_memory_utilization" not in on_gpu
    sharing = engine_arguments(replace(settings, gpu_memory_ratio=0.3), on_cpu=False)
    assert sharing == on_gpu | {"gpu_memory_utilization": 0.3}
    on_cpu = engine_arguments(settings, on_cpu=True)
    assert on_gpu["logprobs_mode"] == on_cpu["logprobs_mode"] == "processed_logprobs"
    assert on_gpu["dtype"] == "bfloat16"
    only_on_cpu = {"enforce_eager", "distributed_executor_backend", "kv_cache_memory_bytes"}
    assert on_cpu.keys() - on_gpu.keys() == {*only_on_cpu, "enable_chunked_prefill"}
    assert on_cpu["enable_chunked_prefill"] is False
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 30


def test_an_argument_that_vllm_does_not_know_is_named_with_the_likely_one():
    group = {"name": "a", "engine": "vllm", "engineArguments": {"max_num_batched_token": 8}}
    required = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 1}
    spec = VCPORunSpec.model_validate({**required, "rollouts": [group]})
    with pytest.raises(
        ValueError,
        match=r"engineArguments.max_num_batched_token: .* write 'max_num_batched_tokens'",
    ):
        find_engine(spec, spec.rollouts[0])
