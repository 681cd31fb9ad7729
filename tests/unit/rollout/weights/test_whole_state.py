"""After any versions, whole or by deltas, a worker's whole state is the learner's."""

import copy

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.fixtures.learner.models import llama, with_buffers
from tests.fixtures.rollout.models import request_for
from tests.fixtures.rollout.policy_versions import weight_files
from tests.fixtures.weight_changes import store_in_process
from vcpo.api.workloads import Lora, Precision
from vcpo_learner.model.loading import policy_tensors
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.policy_state import persistent_buffers, policy_state
from vcpo_rollout.engines.engine import PolicyWeights
from vcpo_rollout.engines.held_state import held_tensors
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.engines.loading import load_model_skeleton, load_state, torch_dtype
from vcpo_rollout.engines.loading_weights import copy_weights, stage_weights
from vcpo_rollout.weights.fetcher import WeightFetcher
from vcpo_rollout.weights.postprocess import LoraMerge

CHANGES = st.fixed_dictionaries(
    {
        "share": st.sampled_from((0.0, 0.02, 0.9)),
        "buffers": st.sets(st.sampled_from(("bias", "table", "is_set"))),
        "is_taken": st.booleans(),
    }
)


class Worker:
    """A model, and the fetcher that brings versions to it."""

    def __init__(self, model, precision):
        self.model = model.to(torch_dtype(precision))
        # `Module.to` casts floating buffers as well; a skeleton has them so too.
        for each in held_tensors(self.model).values():
            each.data = torch.full_like(each, 1)
        self.fetcher, self.in_use = WeightFetcher(weight_files()), None

    async def take(self, store):
        """Take the newest version: by the deltas from the version in use, or whole."""
        weights = await self.fetcher.fetch(store.newest.manifest)
        copy_weights(self.model, stage_weights(self.model, weights, in_use=self.in_use))
        self.in_use = weights.policy_version


@torch.no_grad()
def change(model, seed, share, buffers):
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        chosen = torch.rand(each.shape, generator=generator) < share
        each.add_(chosen * torch.randn(each.shape, generator=generator))
    layer = model.model.layers[1]
    if "bias" in buffers:
        layer.bias[1] = torch.rand(1, generator=generator) * 1e-3
    if "table" in buffers:
        layer.table[0, 1] += 1 << 33
    if "is_set" in buffers:
        layer.is_set.logical_not_()


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(CHANGES, min_size=1, max_size=5), precision=st.sampled_from(Precision))
async def test_after_any_versions_a_worker_holds_the_learners_state_bit_for_bit(steps, precision):
    torch.manual_seed(0)
    learner = with_buffers(llama(tied=True))
    worker = Worker(copy.deepcopy(learner), precision)
    state, store = PublishedState(learner), store_in_process("i", lambda: 0.0)
    for version, step in enumerate(steps):
        change(learner, version, step["share"], step["buffers"])
        store.publish(store.prepare(version, state.take(precision)))
        if step["is_taken"] or version == len(steps) - 1:
            await worker.take(store)
    held = held_tensors(worker.model)
    expected = policy_state(learner)
    assert held.keys() == expected.keys()
    for name, each in expected.items():
        is_buffer = name in persistent_buffers(learner)
        published = each if is_buffer else each.to(torch_dtype(precision))
        assert torch.equal(held[name].to(published.dtype), published), name


@pytest.fixture(scope="module")
def router_folder(tmp_path_factory):
    """A mixture of experts with a trained bias of its router, whose values bfloat16 has not."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV3ForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.randn(4) / 3)
    folder = tmp_path_factory.mktemp("router")
    model.save_pretrained(folder)
    return folder


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def engine_for(model, precision=Precision.FLOAT32):
    return HfEngine(
        model,
        end_token_ids=frozenset(),
        pad_token_id=0,
        max_concurrent_sequences=2,
        seed=0,
        precision=precision,
    )


def loaded(folder):
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


async def test_a_worker_in_bfloat16_does_not_round_a_routers_bias(router_folder):
    learner = loaded(router_folder)
    skeleton = load_model_skeleton(str(router_folder), precision=Precision.BFLOAT16)
    engine = engine_for(skeleton, Precision.BFLOAT16)
    tensors = policy_tensors(learner, torch.bfloat16)
    for version in (1, 2):
        tensors[BIAS] += 1e-3
        await engine.swap_weights(PolicyWeights(version, safetensors.torch.save(tensors)))
        await engine.generate(request_for((5, 6, 7), max_new_tokens=2))
    await engine.close()
    held = held_tensors(skeleton)
    assert torch.equal(held[BIAS], tensors[BIAS])
    assert {each.dtype for name, each in held.items() if name != BIAS} == {torch.bfloat16}


async def test_workers_that_merge_adapters_read_the_base_models_buffers(router_folder):
    learner = loaded(router_folder)
    add_adapters(learner, Lora(rank=2, targetModules=["o_proj"]))
    merge = LoraMerge(base=load_state(str(router_folder)), scale=Lora(rank=2).scale)
    merged = merge(policy_tensors(learner), 1)
    assert torch.equal(merged[BIAS], persistent_buffers(learner)[BIAS])
    engine = engine_for(load_model_skeleton(str(router_folder)))
    await engine.swap_weights(PolicyWeights(1, safetensors.torch.save(merged)))
    await engine.close()
