"""Steps whose logits are computed in tiles of 3 tokens and 7 rows of the vocabulary."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.fixtures.learner.models import (
    HEADS,
    PAD,
    SIZES,
    llama,
    qwen2,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import expected_gradient, gradient_of_step, make_spec
from vcpo.api.algorithm import RowLayout
from vcpo.api.workloads import Lora
from vcpo_learner.forward import policy_network
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.output_head import logit_tiles, trajectory_gradients
from vcpo_learner.output_head.logit_tiles import TileSize
from vcpo_learner.update.policy_update import PolicyUpdate

MODELS = {
    **HEADS,
    "Gemma 3, tied and scaled": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8)),
}
WAYS = {"formed": -1e9, "products": 1e9}
"""Operations that a touch of memory is worth, so that one way is always the cheaper one."""

GEMMA = "Gemma 3, tied and scaled"
CASES = [
    *((family, RowLayout.PADDED, "formed") for family in MODELS),
    # Gemma's norms of queries have heads before tokens: packed rows cannot be measured.
    *((family, RowLayout.PACKED, "products") for family in MODELS if family != GEMMA),
    (GEMMA, RowLayout.PADDED, "products"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(policy_network.SMALL_LOGITS, "cpu", 0)
    monkeypatch.setitem(logit_tiles._TILE_SIZES, "cpu", TileSize(tokens=3, vocabulary=7))


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("family", "layout", "way"), CASES)
def test_the_gradient_is_the_estimators_for_every_head(family, layout, way, monkeypatch):
    monkeypatch.setitem(trajectory_gradients._FLOPS_PER_TOUCH, "cpu", WAYS[way])
    model = seeded_model(MODELS[family]).double()
    model.set_attn_implementation("eager")  # sdpa leaves out Gemma 2's cap
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "opob", temperature=0.7)
    spec = make_spec(temperature=0.7)
    batch = spec.batch.model_copy(update={"row_layout": layout})
    found = gradient_of_step(model, spec.model_copy(update={"batch": batch}), groups)
    assert relative(found, expected) < 1e-6


def test_a_plain_step_has_the_gradient_of_full_logits():
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "groupMean")
    assert (
        relative(gradient_of_step(model, make_spec(baseline="groupMean"), groups), expected) < 1e-9
    )


@pytest.mark.parametrize("make", [llama, qwen2], ids=["untied", "tied"])
def test_a_step_in_bfloat16_is_near_the_one_in_float32(make):
    document = make_spec().model_dump(by_alias=True)
    rounded = make_spec().model_validate({**document, "learner": {"precision": "bfloat16"}})
    groups = sampled_groups(seeded_model(make))
    exact = gradient_of_step(seeded_model(make), make_spec(), groups)
    assert relative(gradient_of_step(seeded_model(make), rounded, groups), exact) < 0.05


def test_a_head_of_adapters_below_is_frozen_and_trains_them():
    model = seeded_model(llama)
    add_adapters(model, Lora(rank=2, targetModules=["q_proj"]))
    head = model.lm_head.weight.clone()
    result = PolicyUpdate(model, make_spec(), PAD).step(sampled_groups(model), policy_version=9)
    assert result.skipped is None
    assert result.gradient_norm > 0.0
    assert torch.equal(model.lm_head.weight, head)
