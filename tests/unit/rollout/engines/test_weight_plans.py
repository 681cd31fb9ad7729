"""Who quantizes weights and who applies adapters: vLLM or the worker."""

import pytest

from vcpo.api.workloads import EngineName, Lora, Precision, Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterUse, plan_adapters
from vcpo_rollout.engines.quantization import Device, plan_quantization

HOPPER = Device(platform="cuda", capability=90)
ADA = Device(platform="cuda", capability=89)
AMPERE = Device(platform="cuda", capability=80)
UNKNOWN = Device(platform="cuda")
CPU = Device(platform="cpu")
ROCM = Device(platform="rocm", capability=94)


@pytest.mark.parametrize(
    ("quantization", "precision", "device", "method", "reason"),
    [
        ("fp8", "bfloat16", HOPPER, "fp8_per_block", "9.0 has fp8"),
        ("fp8", "bfloat16", ADA, "fp8_per_block", "8.9 has fp8"),
        ("fp8", "bfloat16", CPU, None, "slower than its bfloat16"),
        ("fp8", "bfloat16", AMPERE, None, "takes a compute capability of 8.9, and this one is 8.0"),
        ("fp8", "bfloat16", UNKNOWN, None, "this one is unknown"),
        ("fp8", "bfloat16", ROCM, None, "for rocm have not been tried"),
        ("fp8", "bfloat16", None, None, "engine has no kernels"),
        ("fp8", "float32", HOPPER, None, "group's precision is float32"),
        ("fp8", "float32", CPU, None, "group's precision is float32"),
        ("int8", "bfloat16", HOPPER, None, "no linear layer to int8"),
        ("int8", "bfloat16", CPU, None, "no linear layer to int8"),
    ],
)
def test_vllm_quantizes_where_it_can_and_rounding_stands_in_elsewhere(
    quantization, precision, device, method, reason
):
    asked = Quantization(quantization)
    plan = plan_quantization(asked, precision=Precision(precision), device=device)
    assert plan.online_method == method
    assert plan.rounding is (asked if method is None else Quantization.NONE)
    assert reason in plan.reason


def test_what_nobody_asked_for_nobody_does():
    plan = plan_quantization(Quantization.NONE, precision=Precision.BFLOAT16, device=HOPPER)
    assert plan.online_method is None
    assert plan.rounding is Quantization.NONE


def test_the_log_says_who_quantizes_and_why():
    plan = plan_quantization(Quantization.INT8, precision=Precision.BFLOAT16, device=CPU)
    assert str(plan) == "int8 by rounding: vLLM quantizes no linear layer to int8 as it loads"


def plan(device, *, rank=16, rounding=Quantization.NONE, **group):
    settings = RolloutGroup.model_validate({"name": "main", "engine": EngineName.VLLM, **group})
    return plan_adapters(Lora(rank=rank), settings, rounding=rounding, device=device)


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (HOPPER, {"precision": "bfloat16"}),
        (HOPPER, {"precision": "bfloat16", "quantization": "fp8"}),
        (HOPPER, {"precision": "bfloat16", "rank": 512}),
        (CPU, {"precision": "bfloat16"}),
        (CPU, {"precision": "float32"}),
    ],
)
def test_vllm_serves_adapters_beside_its_base_model(device, given):
    assert plan(device, **given).use is AdapterUse.SERVED


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (None, {"engine": EngineName.HF}, "engine 'hf' takes full sets of weights"),
        (CPU, {"rounding": Quantization.INT8}, "rounds weights and adapters together to int8"),
        (HOPPER, {"precision": "bfloat16", "noise": {}}, "noise changes the weights"),
        (HOPPER, {"precision": "bfloat16", "rank": 513}, "up to 512, and this one is 513"),
        (HOPPER, {"precision": "float32"}, "bfloat16 only, and the precision is float32"),
    ],
)
def test_what_vllm_cannot_serve_is_merged_and_the_log_says_why(device, given, reason):
    found = plan(device, **given)
    assert found.use is AdapterUse.MERGED
    assert str(found).startswith("merged: ")
    assert reason in str(found)
