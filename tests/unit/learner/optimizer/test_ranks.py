"""Optimizer of a model that is cut over two ranks."""

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from tests.fixtures.learner.models import llama
from tests.fixtures.learner.ranks import run_ranks
from vcpo.api.optimizer import Optimizer
from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer, clip_gradient
from vcpo_learner.ranks.sharding import place_model, whole


def seeded_llama():
    torch.manual_seed(0)
    return llama()


def gradients(model):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each.shape, generator=generator) for each in model.parameters()]


def cut(ranks):
    """The model on this rank, with its part of the gradient."""
    model = seeded_llama()
    whole = gradients(model)
    place_model(model, ranks, Precision.FLOAT32)
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    return model


def train(ranks):
    model = cut(ranks)
    norm = clip_gradient(model.parameters(), 0.5)
    optimizer = PolicyOptimizer(model, Optimizer(weightDecay=0.1))
    optimizer.step(0.01, 0.5)
    numbers = {name: whole(each.detach()) for name, each in model.named_parameters()}
    with pytest.raises(StartError, match="'muon' works with one rank only; use adamw"):
        PolicyOptimizer(model, Optimizer(name="muon"))
    model.get_parameter("lm_head.weight").grad.to_local().fill_(float("nan") if ranks.rank else 0.0)
    broken = clip_gradient(model.parameters(), 0.5)
    kept = model.get_parameter("model.norm.weight").grad.full_tensor()
    return norm, numbers, broken, kept


def test_two_ranks_clip_and_step_as_one():
    (norm, numbers, broken, kept), (other_norm, _, other_broken, other_kept) = run_ranks(2, train)
    model = seeded_llama()
    for parameter, gradient in zip(model.parameters(), gradients(model), strict=True):
        parameter.grad = gradient
    exact = torch.cat([each.flatten() for each in gradients(model)]).double().norm()
    assert norm == other_norm == pytest.approx(float(exact), rel=1e-6)
    clip_gradient(model.parameters(), 0.5)
    PolicyOptimizer(model, Optimizer(weightDecay=0.1)).step(0.01, 0.5)
    torch.testing.assert_close(
        numbers,
        {name: each.detach() for name, each in model.named_parameters()},
        rtol=1e-5,
        atol=1e-7,
    )
    # One rank's NaN is every rank's, and nothing is clipped by it.
    assert broken != broken
    assert other_broken != other_broken
    assert torch.equal(kept, other_kept)
    assert torch.isfinite(kept).all()
