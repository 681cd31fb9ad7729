"""Engines that read checkpoints get what `save_pretrained` writes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
)

from vcpo_rollout.engines.checkpoint_form import in_checkpoint_form

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, head_dim=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_version_gets_the_names_and_shapes_of_the_saved_model(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(CONFIGS[family])
    found = in_checkpoint_form(skeleton, state)
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
