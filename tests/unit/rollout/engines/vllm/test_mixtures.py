"""A mixture of experts on a real vLLM computes with the weights and the router of each swap."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.fixtures.rollout.models import forward_logprobs, request_for, weights_of
from tests.unit.rollout.engines.vllm.tiny_vllm import build, save_settings
from vcpo_rollout.engines.engine import WeightChanges
from vcpo_rollout.engines.vllm.engine import VllmEngine

PROMPT = (5, 6, 7)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def build_mixture(*, seed):
    torch.manual_seed(seed)
    shape = build(seed=0).config.to_dict()
    sizes = {key: shape[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = Glm4MoeConfig(
        **sizes,
        architectures=["Glm4MoeForCausalLM"],
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=1 << 15,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Glm4MoeForCausalLM(config).eval()
    # Values that bfloat16 has not; a router without them chooses other experts.
    model.get_buffer(BIAS).copy_(torch.randn(8) / 3)
    return model


@pytest.mark.asyncio
async def test_each_version_of_a_mixture_samples_as_a_whole_whatever_its_changes(tmp_path):
    settings = save_settings(tmp_path)
    first, second, third = (build_mixture(seed=seed) for seed in (1, 2, 3))
    first.config.save_pretrained(tmp_path)
    nothing = WeightChanges(base_policy_version=2, positions={})
    versions = {
        1: (first, weights_of(first, 1)),
        2: (second, weights_of(second, 2)),
        3: (third, replace(weights_of(third, 3), changes=nothing)),
    }
    engine = await asyncio.to_thread(VllmEngine.start, settings, end_token_ids=frozenset({3}))
    try:
        for model, weights in versions.values():
            await engine.swap_weights(weights)
            response = await engine.generate(request_for(PROMPT, max_new_tokens=8))
            expected = forward_logprobs(model, PROMPT, response.token_ids)
            assert response.logprobs == pytest.approx(expected, abs=1e-4)
    finally:
        await engine.close()
