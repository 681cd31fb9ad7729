"""What a step takes of GPUs; the numbers are counted by hand from the sizes of the models."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.fixtures.models import QWEN_1_5B
from vcpo.api import GpuUse, load_run, with_gpu_defaults
from vcpo_learner.step_plan import plan_lines, token_flops

EXAMPLES = Path(__file__).parents[3] / "examples"
QWEN_7B = QWEN_1_5B | {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152_064,
}
PARTS = "weights {}, gradients {}, moments {}, published {}, copies and kernels {}, activations {}"
RATE = "at 0.226 of 989 TFLOP/s, as 1.5 B on an H200"
SHARED = f"{RATE}; workers take theirs of the same GPU"
# 1.5 B: P = 1,543,714,304. The worker has 2 P, 2 x 2 x 28 x 256 bytes for each of 128 x 2,048
# tokens, and 3 GiB: .162 of 85.5 GB, and .738 stay. Of them 4 P are weights, 8 P gradients with
# sums, 8 P moments, 2 P published, 1.0 GiB copies of the ends and two layers, 2 GiB kernels. Of
# the free memory .9 counts: 20.25 GB are left, at 535,552 bytes a token. 8 P operations a token.
# Adapters: A = 9,232,384, the weights 2 P + 4 A, 4,689,920 bytes a token, 4 P + 6 A operations.
# 7 B on four: P = 7,615,616,512, a quarter of it on each; 10 bytes for each number of the ends and
# of two layers; 1,210,368 bytes a token; 8 (P - 152,064 x 3,584) operations.
PLANS = {
    "qwen_one_gpu": (
        "53.5 of 79.6 GiB (none is here), learner's share 0.74",
        "5.8 11.5 11.5 2.9 3.0 18.9",
        "37,812 in a micro-step, a trajectory has 2,048 at most; activations computed again",
        f"7.24 for 128 responses of 1,024 tokens, {SHARED}",
    ),
    "qwen_one_gpu with adapters": (
        "53.2 of 79.6 GiB (none is here), learner's share 0.74",
        "2.9 0.1 0.1 0.0 2.0 48.1",
        "11,013 in a micro-step, a trajectory has 2,048 at most; activations kept",
        f"3.65 for 128 responses of 1,024 tokens, {SHARED}",
    ),
    "qwen_one_gpu with a GPU for the worker": (
        "71.7 of 79.6 GiB (none is here), learner's share 1.00",
        "5.8 11.5 11.5 2.9 3.0 37.1",
        "74,359 in a micro-step, a trajectory has 2,048 at most; activations computed again",
        f"7.24 for 128 responses of 1,024 tokens, {RATE}",
    ),
    "qwen_8_gpus": (
        "71.9 of 79.6 GiB (none is here) on each of 4, learner's share 1.00",
        "7.1 14.2 14.2 3.5 16.5 16.4",
        "14,515 in a micro-step, a trajectory has 4,096 at most; activations computed again",
        f"66.3 for 512 responses of 2,048 tokens, {RATE}",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_an_example_is_what_its_sizes_say(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = QWEN_7B if "8" in name else QWEN_1_5B
    (tmp_path / "config.json").write_text(json.dumps(config))
    changes = [f"model.name={tmp_path}", *["model.lora.rank=8"] * ("adapters" in name)]
    changes += ["rollouts[0].gpus=1"] * ("worker" in name)
    spec = load_run(EXAMPLES / f"{name.split()[0]}.yaml", changes).spec
    use = GpuUse.of_machine(spec, has_gpus=True, has_vllm=True)
    used, parts, tokens, seconds = PLANS[name]
    assert list(plan_lines(with_gpu_defaults(spec, use))) == [
        f"GPU       {used}: {PARTS.format(*parts.split())}",
        f"tokens    {tokens}",
        f"seconds   {seconds}",
    ]


def test_operations_are_those_of_the_experts_that_a_token_is_sent_to():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    config = Qwen3MoeConfig(vocab_size=10, num_hidden_layers=1, **sizes, **experts)
    # By hand: 192 of q, k, v and o, 8 and 24 of norms, 32 of the router, half of 384, 80 of a head.
    assert token_flops(Qwen3MoeForCausalLM(config), repeats=False) == 6 * 528
