"""Products of factors: rounded like the forward pass, added up in float32 or better."""

import pytest
import torch
from torch import nn

from tests.fixtures.learner.norms import summed
from vcpo_learner.per_sample_gradients import measurement
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, as_factor, product
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def rounded(values):
    """In float64, as bfloat16 holds them."""
    return values.to(BF16).double()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])
def test_under_autocast_norm_and_sum_are_of_what_the_forward_pass_multiplied(monkeypatch, kept):
    monkeypatch.setattr(measurement, "is_kept_cheaper", lambda *_: kept)
    torch.manual_seed(0)
    layer, inputs = nn.Linear(8, 6, bias=False), torch.randn(3, 5, 8)
    output_gradients = torch.randn(3, 5, 6)
    with torch.autocast("cpu", dtype=BF16), record_calls(Slots(layer)) as recording:
        output = layer(inputs)
    assert output.dtype is BF16
    objectives = (output * output_gradients.to(BF16)).float().sum(dim=(1, 2))
    offsets = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    measured = measure_gradients(objectives, recording, summed(layer, offsets, [0, 0, 0]))
    measured.add_to_parameters([0.25])
    each = rounded(output_gradients).mT @ rounded(inputs)
    expected = each.square().sum(dim=(1, 2))
    torch.testing.assert_close(measured.squared_norms, expected, rtol=1e-6, atol=0.0)
    total = ((offsets + 0.25)[:, None, None] * each).sum(dim=0)
    assert layer.weight.grad.dtype is F32
    # A kept factor's sum is rounded once, like that of a plain backward pass.
    tolerance = 0.05 if kept else 1e-5
    torch.testing.assert_close(layer.weight.grad.double(), total, rtol=tolerance, atol=tolerance)


def test_factors_of_bfloat16_stay_in_it_and_their_products_have_the_digits_of_float32():
    found = as_factor(torch.tensor([1.0 + 2.0**-9]), BF16, F32)
    assert found.dtype is BF16
    assert found.tolist() == [1.0]  # bfloat16 has 8 digits of 2
    torch.manual_seed(0)
    first, second = torch.randn(2, 64, 96).to(BF16), torch.randn(2, 96, 80).to(BF16)
    expected = first.double() @ second.double()
    torch.testing.assert_close(product(first, second).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_sum_of_factors_of_bfloat16_keeps_its_digits_until_it_is_complete():
    torch.manual_seed(0)
    rows, columns = torch.randn(3, 40, 64).to(BF16), torch.randn(3, 40, 48).to(BF16)
    coefficients = torch.tensor([1 / 3, -0.7, 1e-3], dtype=F64)[:, None, None]
    each = rows.double().mT @ columns.double()
    expected = (coefficients * each).sum(dim=0)
    total, factors = torch.zeros(64, 48), Factors(rows=rows, columns=columns)
    factors.add_weighted_to(total, coefficients)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    factors.add_weighted_to(total, -coefficients, is_complete=True)
    assert 0.0 < float(total.abs().max()) < 2.0**-7 * float(expected.abs().max())


def test_a_product_of_two_types_has_the_better_one():
    first, second = torch.ones(1, 2, 3, dtype=F32), torch.ones(1, 3, 2, dtype=F64)
    assert product(first, second).dtype is F64


def test_norms_of_bfloat16_parameters_keep_the_digits_of_float32():
    # 257 tokens of gradient 1: bfloat16 cannot count beyond 256.
    layer = nn.Linear(1, 1).to(BF16)
    with record_calls(Slots(layer)) as recording:
        output = layer(torch.ones(1, 257, 1, dtype=BF16))
    objectives = output.sum(dim=(1, 2), dtype=F32)
    measured = measure_gradients(objectives, recording)
    assert measured.squared_norms.tolist() == pytest.approx([2 * 257.0**2], rel=1e-14)


def test_neighbors_that_share_their_input_share_its_products():
    shared, other = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    products = TokenProducts()
    first = products.of(shared, shared)
    assert products.of(shared.detach(), shared.detach()) is first
    assert products.of(other, other) is not first


def test_inner_products_of_factors_are_those_of_full_gradients():
    torch.manual_seed(0)
    one, other = (
        Factors(rows=torch.randn(2, 4, 3).double(), columns=torch.randn(2, 4, 5).double())
        for _ in range(2)
    )
    expected = (one.full(3) * other.full(3)).sum(dim=(1, 2))
    torch.testing.assert_close(one.inner_products(other, TokenProducts()), expected)
