"""Norms, gates and rotations that are one function each compute what the model's own code does."""

import pytest
import torch

from tests.fixtures.learner.models import (
    EVERY_FAMILY,
    HYBRIDS,
    PAD,
    llama,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import make_spec
from vcpo.api.algorithm import RowLayout
from vcpo_learner.forward.fused_layers import fuse_layers
from vcpo_learner.per_sample_gradients import taps
from vcpo_learner.update import gradient as gradient_module
from vcpo_learner.update.gradient import GradientAccumulation

FAMILIES = {**EVERY_FAMILY, **HYBRIDS}
KINDS = {"_Norm", "_Gate", "_Rotation"}


def fused_kinds(model):
    return {type(vars(each).get("forward")).__name__ for each in model.modules()} & KINDS


def norms_and_gradient(make, layout):
    model = seeded_model(make)
    batch = make_spec().batch.model_copy(update={"row_layout": layout})
    spec = make_spec().model_copy(update={"batch": batch})
    accumulation = GradientAccumulation(model, spec, PAD)
    norms = accumulation.score(sampled_groups(model), policy_version=0).summary.squared_norms
    flat = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    return torch.tensor(norms), flat, fused_kinds(model)


@pytest.mark.parametrize("layout", [RowLayout.PADDED, RowLayout.PACKED])
@pytest.mark.parametrize("name", FAMILIES)
def test_norms_and_gradient_are_those_of_the_models_own_code(name, layout, monkeypatch):
    norms, gradient, kinds = norms_and_gradient(FAMILIES[name], layout)
    assert bool(kinds) is (not name.startswith("gpt2"))
    monkeypatch.setattr(gradient_module, "fuse_layers", lambda *_, **__: None)
    own_norms, own_gradient, none = norms_and_gradient(FAMILIES[name], layout)
    assert not none
    assert float(((norms - own_norms).abs() / own_norms).max()) < 2e-6
    assert float((gradient - own_gradient).norm() / own_gradient.norm()) < 1e-6


FAULTS = {"_normalized": "_Norm", "_norm_gradient": "_Norm", "_weight_gradient": "_Norm"}
FAULTS |= {"_gated": "_Gate", "_gate_gradients": "_Gate"}
FAULTS |= {"_rotated": "_Rotation", "_rotated_back": "_Rotation"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_function_with_other_numbers_or_gradients_is_not_used(name, monkeypatch):
    right = getattr(taps, name)

    def wrong(*arguments):
        found = right(*arguments)
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    model = llama()
    monkeypatch.setattr(taps, name, wrong)
    fuse_layers(model, is_half=False)
    assert fused_kinds(model) == KINDS - {FAULTS[name]}


def test_a_kernel_that_cannot_be_made_leaves_a_model_as_it_is_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(taps, "run", lambda *_: 1 / 0)
    model = llama()
    with caplog.at_level("INFO", logger="vcpo_learner.forward.fused_layers"):
        fuse_layers(model, is_half=True)
    assert fused_kinds(model) == set()
    assert "LlamaRMSNorm as it is (ZeroDivisionError: division by zero)" in caplog.messages[-1]


def test_a_measuring_pass_forms_no_gradient_of_a_norms_weight(monkeypatch):
    model = seeded_model(llama)
    accumulation = GradientAccumulation(model, make_spec(), PAD)
    monkeypatch.delattr(taps, "_weight_gradient")
    accumulation.score(sampled_groups(model), policy_version=0)
    assert fused_kinds(model) == KINDS
