"""Tokens without a gradient are left out of a norm, and only those."""

import torch
from torch import nn

from tests.fixtures.learner.norms import recorded_norms


def linear_norms(weights):
    """Norms of a layer of 20 features whose objective weighs its outputs [batch, tokens, 20]."""
    layer, inputs = (
        nn.Linear(3, 20, bias=False).double(),
        torch.ones(*weights.shape[:2], 3).double(),
    )
    found = recorded_norms(layer, inputs, lambda output: (output * weights).flatten(1).sum(dim=1))
    return found.tolist()


def test_tokens_without_a_gradient_are_found_by_all_features():
    weights = torch.zeros(2, 6, 20).double()
    weights[0, 4, 0] = 2.0
    weights[1, 2, 19] = 5.0
    # The gradient is one row of three equal numbers.
    assert linear_norms(weights) == [3 * 2.0**2, 3 * 5.0**2]


def test_trajectories_without_any_gradient_have_the_norm_zero():
    assert linear_norms(torch.zeros(2, 6, 20).double()) == [0.0, 0.0]


def test_a_gradient_that_is_no_number_is_not_taken_for_none():
    weights = torch.zeros(1, 6, 20).double()
    weights[0, 1, 3] = torch.nan
    assert linear_norms(weights)[0] != linear_norms(weights)[0]
