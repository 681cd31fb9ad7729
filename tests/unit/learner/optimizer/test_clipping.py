import pytest
import torch
from torch import nn

from vcpo_learner.optimizer.policy_optimizer import clip_gradient


def layer_with_gradient(value):
    layer = nn.Linear(2, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return layer


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
    layer = layer_with_gradient(1.0)
    layer.weight.grad[0, 0] = float("inf")
    assert clip_gradient(layer.parameters(), 1.0) == float("inf")
    assert layer.bias.grad.tolist() == [1.0]
