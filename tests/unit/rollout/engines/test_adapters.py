import pytest

from vcpo.api.workloads import EngineName, Lora, Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterUse, plan_adapters
from vcpo_rollout.engines.quantization import Device

CPU = Device(platform="cpu")
GPU = Device(platform="cuda", capability=90)


def plan(device, *, rank=16, rounding=Quantization.NONE, **group):
    settings = RolloutGroup.model_validate({"name": "main", "engine": EngineName.VLLM, **group})
    return plan_adapters(Lora(rank=rank), settings, rounding=rounding, device=device)


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (GPU, {"precision": "bfloat16"}),
        (GPU, {"precision": "bfloat16", "quantization": "fp8"}),
        (GPU, {"precision": "bfloat16", "rank": 512}),
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
        (GPU, {"precision": "bfloat16", "noise": {}}, "noise changes the weights"),
        (GPU, {"precision": "bfloat16", "rank": 513}, "up to 512, and this one is 513"),
        (GPU, {"precision": "float32"}, "bfloat16 only, and the precision is float32"),
    ],
)
def test_what_vllm_cannot_serve_is_merged_and_the_log_says_why(device, given, reason):
    found = plan(device, **given)
    assert found.use is AdapterUse.MERGED
    assert str(found).startswith("merged: ")
    assert reason in str(found)
