import pytest
import torch

from tests.unit.learner.output_head.heads import FORMS, case
from vcpo_learner.output_head.logit_tiles import LogitForm, TileSize
from vcpo_learner.output_head.tiled_head import apply_head

SIZES = [TileSize(tokens=1, vocabulary=7), TileSize(tokens=4, vocabulary=10)]
ONE_TILE = TileSize(tokens=100, vocabulary=100)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [*SIZES, ONE_TILE], ids=str)
def test_logprobs_and_gradients_are_those_of_full_logits(size, form, has_bias):
    ours, full = case(has_bias=has_bias).leaves(), case(has_bias=has_bias).leaves()
    call = ours.call(FORMS[form], size=size)
    found = apply_head(ours.hidden, ours.weight, ours.bias, call).logprobs
    expected = full.logprobs(FORMS[form], call.temperature)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    (found * ours.weights).sum().backward()
    (expected * full.weights).sum().backward()
    assert relative(ours.hidden.grad, full.hidden.grad) < 1e-12
    assert relative(ours.weight.grad, full.weight.grad) < 1e-12
    if has_bias:
        assert relative(ours.bias.grad, full.bias.grad) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_entropies_are_those_of_full_logits(form):
    one = case()
    call = one.call(FORMS[form], entropies=True)
    found = apply_head(one.hidden, one.weight, None, call)
    probabilities = one.log_distributions(FORMS[form], call.temperature).exp()
    entropies = torch.special.entr(probabilities).sum(-1)
    torch.testing.assert_close(found.entropies, entropies, rtol=1e-11, atol=1e-12)


def test_what_is_not_wanted_is_not_computed():
    one = case()
    found = apply_head(one.hidden, one.weight, None, one.call())
    assert found.entropies is None


def test_entropies_carry_no_graph():
    one = case().leaves()
    found = apply_head(one.hidden, one.weight, None, one.call(entropies=True))
    assert found.logprobs.requires_grad
    assert not found.entropies.requires_grad


def test_logits_that_overflow_an_exponential_are_scored():
    # Products of some thousands: exp overflows in float64 beyond 709.
    one = case(spread=1e3)
    found = apply_head(one.hidden, one.weight, None, one.call(entropies=True)).logprobs
    torch.testing.assert_close(found, one.logprobs(FORMS["plain"], 0.7), rtol=1e-9, atol=1e-9)


def test_a_certain_token_has_a_log_probability_of_at_most_zero():
    weight = torch.eye(2, 3) * 30.0
    one = case()
    call = one.call(size=ONE_TILE)
    hidden = torch.tensor([[1.0, 0.0, 0.0]]).repeat(len(one.targets), 1)
    call = type(call)(
        targets=torch.zeros(len(hidden), dtype=torch.int64),
        form=LogitForm(),
        temperature=1.0,
    )
    found = apply_head(hidden, weight, None, call)
    assert bool((found.logprobs <= 0.0).all())


def test_bfloat16_inputs_add_up_in_float32():
    one = case(dtype=torch.float32)
    rounded = case(dtype=torch.float32)
    call = one.call(input_dtype=torch.bfloat16)
    found = apply_head(one.hidden, one.weight, None, call).logprobs
    full = type(rounded)(
        hidden=rounded.hidden.bfloat16().float(),
        weight=rounded.weight.bfloat16().float(),
        bias=None,
        targets=rounded.targets,
        lengths=rounded.lengths,
        weights=rounded.weights,
    )
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, full.logprobs(FORMS["plain"], 0.7), rtol=1e-5, atol=1e-5)


def test_bfloat16_parameters_get_gradients_in_their_type():
    one = case(dtype=torch.float32)
    hidden = one.hidden.bfloat16().requires_grad_()
    weight = one.weight.bfloat16().requires_grad_()
    apply_head(hidden, weight, None, one.call()).logprobs.sum().backward()
    assert hidden.grad.dtype is weight.grad.dtype is torch.bfloat16
    full = case(dtype=torch.float32)
    exact = full.weight.bfloat16().float().requires_grad_()
    logits = full.hidden.bfloat16().float() @ exact.T / 0.7
    logits.log_softmax(-1).gather(1, full.targets[:, None]).sum().backward()
    assert relative(weight.grad.float(), exact.grad) < 1e-2


def test_autocast_outside_does_not_change_the_number_type():
    one = case(dtype=torch.float32)
    alone = apply_head(one.hidden, one.weight, None, one.call()).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = apply_head(one.hidden, one.weight, None, one.call()).logprobs
    assert torch.equal(alone, inside)


def test_a_pass_without_a_graph_keeps_no_directions():
    one = case().leaves()
    with torch.no_grad():
        found = apply_head(one.hidden, one.weight, None, one.call()).logprobs
    assert found.grad_fn is None


def test_a_frozen_head_passes_the_gradient_on():
    ours, full = case().leaves(), case().leaves()
    weight = ours.weight.detach()
    apply_head(ours.hidden, weight, None, ours.call()).logprobs.sum().backward()
    full.logprobs(FORMS["plain"], 0.7).sum().backward()
    assert relative(ours.hidden.grad, full.hidden.grad) < 1e-12


def test_no_token_at_all_has_no_log_probability():
    one = case(lengths=(0,))
    assert apply_head(one.hidden, one.weight, None, one.call()).logprobs.shape == (0,)
