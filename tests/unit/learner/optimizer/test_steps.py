import copy

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import llama
from vcpo.spec.optimizer import Optimizer
from vcpo_learner.optimizer.steps import (
    clip_gradient,
    make_optimizer,
    set_learning_rate,
    take_scaled_step,
)

SETTINGS = Optimizer.model_validate(
    {"learningRate": 0.1, "weightDecay": 0.5, "beta1": 0.8, "beta2": 0.7, "epsilon": 1e-6}
)


def layer_with_gradient(value=1.0):
    layer = nn.Linear(2, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return layer


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_a_trained_parameter_costs_sixteen_bytes():
    model = llama()
    optimizer = make_optimizer(model, SETTINGS)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    held = [tensor for one in model.parameters() for tensor in (one, one.grad)]
    held += [
        moment
        for state in optimizer.state.values()
        for name, moment in state.items()
        if name != "step"  # one number for each tensor
    ]
    num_parameters = sum(one.numel() for one in model.parameters())
    assert sum(each.numel() * each.element_size() for each in held) == 16 * num_parameters


def test_matrices_decay_and_vectors_do_not():
    layer = layer_with_gradient(0.0)
    before = copy.deepcopy(layer)
    make_optimizer(layer, SETTINGS).step()
    torch.testing.assert_close(layer.weight, before.weight * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before.bias)


def test_the_spec_sets_the_constants_of_adam():
    optimizer = make_optimizer(nn.Linear(2, 1), SETTINGS)
    assert [(group["betas"], group["eps"]) for group in optimizer.param_groups] == [
        ((0.8, 0.7), 1e-6)
    ] * 2


def test_a_model_without_matrices_makes_one_group():
    assert len(make_optimizer(nn.LayerNorm(2), SETTINGS).param_groups) == 1


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_optimizer(nn.Linear(2, 1).requires_grad_(False), SETTINGS)


def test_a_scaled_step_moves_by_the_scaled_rate():
    # The first step of Adam is the rate times the gradient's sign; biases do not decay.
    layer = layer_with_gradient()
    before = layer.bias.detach().clone()
    take_scaled_step(make_optimizer(layer, SETTINGS), 0.25)
    torch.testing.assert_close(layer.bias, before - 0.025)


def test_a_scaled_step_scales_every_group_by_its_own_rate_and_puts_it_back():
    optimizer = make_optimizer(layer_with_gradient(), SETTINGS)
    optimizer.param_groups[1]["lr"] = 0.3
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(rates(optimizer)))
    take_scaled_step(optimizer, 0.5)
    assert (seen, rates(optimizer)) == ([[0.05, 0.15]], [0.1, 0.3])


def test_the_rate_is_put_back_when_the_step_raises():
    optimizer = make_optimizer(layer_with_gradient(), SETTINGS)

    def fail(*_):
        raise RuntimeError

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        take_scaled_step(optimizer, 0.5)
    assert rates(optimizer) == [0.1, 0.1]


def test_a_learning_rate_is_set_in_every_group():
    optimizer = make_optimizer(nn.Linear(2, 1), SETTINGS)
    set_learning_rate(optimizer, 0.7)
    assert rates(optimizer) == [0.7, 0.7]


def test_a_long_gradient_is_scaled_to_the_largest_norm():
    # Three entries of 2: norm sqrt(12).
    layer = layer_with_gradient(2.0)
    assert clip_gradient(layer.parameters(), 1.0) == pytest.approx(12**0.5)
    entries = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])
    assert float(entries.norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_short_gradient_is_left_as_it_is():
    layer = layer_with_gradient(0.1)
    clip_gradient(layer.parameters(), 1.0)
    assert layer.bias.grad.tolist() == pytest.approx([0.1])


def test_a_gradient_that_is_not_finite_is_reported_and_left_as_it_is():
    layer = layer_with_gradient()
    layer.weight.grad[0, 0] = float("inf")
    assert clip_gradient(layer.parameters(), 1.0) == float("inf")
    assert layer.bias.grad.tolist() == [1.0]
