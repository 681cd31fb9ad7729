"""Quantized and noisy weights, computed by hand."""

import copy
import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from research.cells.versions import policy_tensors
from tests.fixtures.families import SIZES
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama, with_buffers
from tests.fixtures.rollout.models import request_for
from tests.fixtures.rollout.policy_versions import weight_files
from tests.fixtures.weight_changes import store_in_process
from vcpo.api.workloads import Lora, Precision, Quantization
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.policy_state import persistent_buffers, policy_state
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import EngineError, PolicyWeights
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.engines.loading import load_model_skeleton, load_state, torch_dtype
from vcpo_rollout.engines.loading_weights import copy_weights, held_tensors, stage_weights
from vcpo_rollout.weights.postprocess import (
    LoraMerge,
    NoiseSchedule,
    QuantizationAndNoise,
    WeightPostprocessing,
    make_postprocessing,
    round_to_fp8,
    round_to_int8,
)
from vcpo_rollout.weights.receiver import WeightFetcher

BASE = {"a.weight": torch.zeros(3, 2), "a.bias": torch.ones(3), "norm.weight": torch.ones(2)}
FIRST, SECOND = "a.lora_A.default.weight", "a.lora_B.default.weight"
ADAPTERS = {
    FIRST: torch.tensor([[1.0, 2.0]]),
    SECOND: torch.tensor([[1.0], [0.0], [-1.0]]),
}


def merge(**given):
    return LoraMerge(base=BASE, scale=0.5)({**ADAPTERS, **given}, 7)


def test_the_product_is_added_to_its_layer_and_nothing_else_changes():
    merged = merge()
    assert merged["a.weight"].tolist() == [[0.5, 1.0], [0.0, 0.0], [-0.5, -1.0]]
    assert merged.keys() == BASE.keys()
    assert all(torch.equal(merged[name], BASE[name]) for name in ("a.bias", "norm.weight"))
    assert not BASE["a.weight"].any()  # from which the next version starts


def test_types_stay_those_of_the_base():
    base = {name: each.to(torch.bfloat16) for name, each in BASE.items()}
    merged = LoraMerge(base=base, scale=0.5)(ADAPTERS, 7)
    assert {each.dtype for each in merged.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b.lora_A.default.weight": torch.ones(1, 2)}, "b.lora_B.default.weight is missing"),
        (
            {
                "b.lora_A.default.weight": torch.ones(1, 2),
                "b.lora_B.default.weight": torch.ones(3, 1),
            },
            "b.weight: the model has no parameter that fits",
        ),
        ({SECOND: torch.ones(4, 1)}, "a.weight: the model has no parameter that fits"),
        ({SECOND: torch.ones(3, 2)}, "a.weight: the model has no parameter that fits"),
        ({"a.weight": torch.ones(3, 2)}, "a.weight is not an adapter"),
    ],
)
def test_what_does_not_belong_to_the_model_is_refused_by_name(given, message):
    with pytest.raises(EngineError, match=message):
        merge(**given)


TINY = "examples/models/tiny"


def postprocessing_for(adapters=None, rounding=None, **sections):
    spec = make_run(**sections).spec
    group = spec.rollouts[0]
    rounding = rounding or group.quantization
    return make_postprocessing(spec, group, seed=0, rounding=rounding, adapters=adapters)


@pytest.mark.parametrize(
    ("adapters", "given"),
    [
        (None, {}),
        (AdapterUse.SERVED, {"model": {"name": TINY, "lora": {}}}),
        (None, {"rollouts": [{"name": "a", "quantization": "fp8"}]}),
    ],
    ids=["nothing asked", "adapters", "fp8"],
)
def test_what_the_engine_does_itself_comes_to_it_as_it_was_published(adapters, given):
    assert postprocessing_for(adapters, rounding=Quantization.NONE, **given) is None


def test_a_groups_noise_lasts_as_long_as_the_run():
    found = postprocessing_for(steps=30, rollouts=[{"name": "a", "noise": {"stages": 3}}])
    (transform,) = found.transforms
    # Ten steps each: none, 0.01 as by default, 0.0001.
    sigmas = [transform.noise.sigma(step) for step in (9, 10, 20)]
    assert sigmas == pytest.approx([0.0, 0.01, 0.0001])


def test_adapters_are_merged_before_anything_is_rounded():
    found = postprocessing_for(
        AdapterUse.MERGED,
        model={"name": TINY, "lora": {"rank": 1, "alpha": 3}},
        rollouts=[{"name": "a", "quantization": "int8"}],
    )
    merge, transform = found.transforms
    assert isinstance(merge, LoraMerge)
    assert merge.scale == 3.0
    assert merge.base.keys() == load_state(TINY).keys()
    assert isinstance(transform, QuantizationAndNoise)
    assert transform.quantization is Quantization.INT8


def test_transforms_follow_one_another_from_file_to_file():
    def double(tensors, policy_version):
        return {name: each * 2 for name, each in tensors.items()}

    def add_version(tensors, policy_version):
        return {name: each + policy_version for name, each in tensors.items()}

    payload = safetensors.torch.save({"a": torch.tensor([1.0, 2.0])})
    found = WeightPostprocessing(transforms=[double, add_version])(PolicyWeights(5, payload))
    assert safetensors.torch.load(found.payload)["a"].tolist() == [7.0, 9.0]


NOISE = NoiseSchedule(initial_sigma=0.1, final_sigma=0.01, num_stages=10, total_steps=10)
WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(8, 4),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4),
    "model.layers.0.self_attn.q_proj.bias": torch.randn(4),
    "model.layers.0.input_layernorm.weight": torch.ones(4096),
    "model.norm.weight": torch.ones(4096),
    "lm_head.weight": torch.randn(8, 4),
}
NORMS = {"model.layers.0.input_layernorm.weight", "model.norm.weight"}


def quantization_and_noise(*, quantization=Quantization.NONE, noise=None, seed=0):
    return QuantizationAndNoise(quantization=quantization, noise=noise, seed=seed)


def changed_tensors(altered):
    return {name for name, tensor in WEIGHTS.items() if not torch.equal(tensor, altered[name])}


def test_e4m3_keeps_three_bits_behind_the_first():
    # The largest is 448, so the scale is 1: between 16 and 32 numbers are 2 apart, ties to even.
    rounded = round_to_fp8(torch.tensor([[448.0, 17.0, 19.0, 18.9, -21.5, 0.3]]))
    assert rounded.tolist() == [[448.0, 16.0, 20.0, 18.0, -22.0, 0.3125]]


def test_every_block_of_128_by_128_has_its_own_scale():
    matrix = torch.zeros(130, 129)
    matrix[0, 0], matrix[0, 128], matrix[129, 0] = 448.0, 4.48, 0.0448
    matrix[1, 128] = 0.17
    rounded = round_to_fp8(matrix)
    assert rounded[[0, 0, 129], [0, 128, 0]].tolist() == pytest.approx([448.0, 4.48, 0.0448])
    # 0.17 is 17 at this block's scale, and becomes 16; at the first block's it would be 0.171875.
    assert float(rounded[1, 128]) == pytest.approx(0.16)


def test_int8_has_127_steps_to_the_largest_of_a_row():
    rounded = round_to_int8(torch.tensor([[1.27, 0.014, -0.016], [254.0, 1.9, 0.0]]))
    torch.testing.assert_close(rounded, torch.tensor([[1.27, 0.01, -0.02], [254.0, 2.0, 0.0]]))


@pytest.mark.parametrize("rounded", [round_to_fp8, round_to_int8])
def test_a_matrix_of_zeros_stays_one(rounded):
    assert not rounded(torch.zeros(3, 5)).any()


@given(st.integers(0, 99))
def test_numbers_move_by_no_more_than_half_a_step(seed):
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    largest = matrix.abs().amax(dim=1, keepdim=True)
    assert ((round_to_int8(matrix) - matrix).abs() <= largest / 254 * (1 + 1e-5)).all()
    # Three bits: 1/16 of a number, or half the smallest step, 2^-10, at the scale amax / 448.
    slack = torch.maximum(matrix.abs() / 16, matrix.abs().max() / 448 * 2**-10)
    assert ((round_to_fp8(matrix) - matrix).abs() <= slack * (1 + 1e-5)).all()


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT8])
def test_matrices_are_rounded_and_embeddings_and_head_are_not(quantization):
    altered = quantization_and_noise(quantization=quantization)(WEIGHTS, 5)
    assert changed_tensors(altered) == {"model.layers.0.self_attn.q_proj.weight"}


def test_noise_is_on_the_weights_of_normalizations_with_the_stages_deviation():
    assert changed_tensors(quantization_and_noise(noise=NOISE)(WEIGHTS, 0)) == set()
    altered = quantization_and_noise(noise=NOISE)(WEIGHTS, 1)
    assert changed_tensors(altered) == NORMS
    # 8,192 draws: the deviation of their deviation is 0.1 / sqrt(2 * 8192), 0.8 %.
    added = torch.cat([altered[name] - 1.0 for name in sorted(NORMS)])
    assert float(added.std()) == pytest.approx(0.1, rel=0.04)
    assert float(added.mean()) == pytest.approx(0.0, abs=0.1 * 4 / math.sqrt(8192))


def test_noise_is_drawn_for_every_version_tensor_and_seed_and_is_reproducible():
    first = quantization_and_noise(noise=NOISE)(WEIGHTS, 1)
    again = quantization_and_noise(noise=NOISE)(dict(reversed(WEIGHTS.items())), 1)
    assert all(torch.equal(first[name], again[name]) for name in WEIGHTS)
    others = [
        quantization_and_noise(noise=replace(NOISE, final_sigma=0.1))(WEIGHTS, 2)[
            "model.norm.weight"
        ],
        quantization_and_noise(noise=NOISE, seed=1)(WEIGHTS, 1)["model.norm.weight"],
        first["model.layers.0.input_layernorm.weight"],
    ]
    assert not any(torch.equal(first["model.norm.weight"], other) for other in others)


def test_what_was_given_is_left_alone_and_types_stay():
    given = {name: tensor.to(torch.bfloat16) for name, tensor in WEIGHTS.items()}
    before = {name: tensor.clone() for name, tensor in given.items()}
    altered = quantization_and_noise(quantization=Quantization.FP8, noise=NOISE)(given, 1)
    assert all(torch.equal(given[name], before[name]) for name in given)
    assert {tensor.dtype for tensor in altered.values()} == {torch.bfloat16}


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
        weights = await self.fetcher.fetch(store.newest)
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
    store = store_in_process("i", lambda: 0.0)
    state = PublishedState(learner, store.full_set_memory)
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
        **SIZES | {"head_dim": 8, "num_key_value_heads": 4}, moe_intermediate_size=16,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
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
    tensors = safetensors.torch.load(bytes(PublishedState(learner).whole(Precision.BFLOAT16)))
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
