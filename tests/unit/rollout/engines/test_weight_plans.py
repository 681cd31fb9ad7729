"""Who quantizes weights and who applies adapters: vLLM or the worker."""

import pytest

from vcpo.api.workloads import EngineName, Lora, Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.weight_plan import Device, WeightPlan, decide

HOPPER = Device(platform="cuda", capability=90)
ADA = Device(platform="cuda", capability=89)
AMPERE = Device(platform="cuda", capability=80)
UNKNOWN = Device(platform="cuda")
CPU = Device(platform="cpu")
ROCM = Device(platform="rocm", capability=94)


def plan(device, *, rank=None, **group):
    given = {"name": "main", "engine": EngineName.VLLM, "precision": "bfloat16", **group}
    lora = None if rank is None else Lora(rank=rank)
    return decide(lora, RolloutGroup.model_validate(given), device)


@pytest.mark.parametrize("device", [HOPPER, ADA])
def test_vllm_quantizes_where_it_has_fp8_in_hardware(device):
    found = plan(device, quantization="fp8")
    assert found.online_method == "fp8_per_block"
    assert found.rounding is Quantization.NONE


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (CPU, {"quantization": "fp8"}, "fp8 on cpu is slow"),
        (AMPERE, {"quantization": "fp8"}, "compute capability of 8.9, and this one is 80"),
        (UNKNOWN, {"quantization": "fp8"}, "this one is None"),
        (ROCM, {"quantization": "fp8"}, "on rocm is slow, or was not tried"),
        (None, {"quantization": "fp8"}, "engine has no kernels"),
        (HOPPER, {"quantization": "fp8", "precision": "float32"}, "the precision is float32"),
        (HOPPER, {"quantization": "int8"}, "no linear layer to int8"),
    ],
)
def test_elsewhere_rounding_stands_in_and_the_log_says_why(device, given, reason):
    found = plan(device, **given)
    assert (found.online_method, found.rounding) == (None, given["quantization"])
    (said,) = found.reasons
    assert said.startswith(f"quantization: {given['quantization']} by rounding: ")
    assert reason in said


def test_what_nobody_asked_for_nobody_does():
    assert plan(HOPPER) == WeightPlan()


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (HOPPER, {}),
        (HOPPER, {"quantization": "fp8"}),
        (HOPPER, {"rank": 512}),
        (CPU, {}),
        (CPU, {"precision": "float32"}),
    ],
)
def test_vllm_serves_adapters_beside_its_base_model(device, given):
    assert plan(device, **{"rank": 16, **given}).adapters is AdapterUse.SERVED


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (None, {"engine": EngineName.HF}, "engine 'hf' takes full sets of weights"),
        (CPU, {"quantization": "int8"}, "rounds weights and adapters together to int8"),
        (HOPPER, {"noise": {}}, "noise changes the weights"),
        (HOPPER, {"rank": 513}, "up to 512, and this one is 513"),
        (HOPPER, {"precision": "float32"}, "bfloat16 only, and not in float32"),
    ],
)
def test_what_vllm_cannot_serve_is_merged_and_the_log_says_why(device, given, reason):
    found = plan(device, **{"rank": 16, **given})
    assert found.adapters is AdapterUse.MERGED
    assert found.reasons[-1].startswith("adapters: merged: ")
    assert reason in found.reasons[-1]
