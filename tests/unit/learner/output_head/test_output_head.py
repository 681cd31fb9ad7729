import pytest
import torch
from torch import nn

from tests.unit.learner.output_head.heads import FORMS, VOCABULARY, case
from vcpo_learner.output_head import logit_tiles, trajectory_gradients
from vcpo_learner.output_head.gradient_tiles import own_rows, runs_of_tokens
from vcpo_learner.output_head.logit_tiles import LogitForm, TileSize
from vcpo_learner.output_head.tiled_head import apply_head
from vcpo_learner.output_head.trajectory_gradients import (
    GradientSums,
    TrajectoryGradients,
    TrajectoryWeights,
)
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import Recording

SIZES = [TileSize(tokens=1, vocabulary=7), TileSize(tokens=4, vocabulary=10)]
ONE_TILE = TileSize(tokens=100, vocabulary=100)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(params=[False, True], ids=["operations", "kernels"])
def is_compiling(request, monkeypatch):
    """The functions of a tile as they are, and what a compiler makes kernels of."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: request.param)


@pytest.mark.usefixtures("is_compiling")
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
        targets=torch.zeros(len(hidden), dtype=torch.int64), form=LogitForm(), temperature=1.0
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


@pytest.mark.parametrize(("has_bias", "gradient"), [(False, 2), (True, 4)])
def test_a_kernel_writes_two_bytes_of_a_number_that_is_a_factor_only(
    has_bias, gradient, monkeypatch
):
    written = []

    def run(function, products, *rest):
        before, found = products.clone(), function(products, *rest)
        assert torch.equal(products, before)
        numbers = found if isinstance(found, tuple) else [found]
        written.extend(each.itemsize for each in numbers if each is not None and each.dim() == 2)
        return found

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(logit_tiles, "run", run)
    one = case(has_bias=has_bias, dtype=torch.float32).leaves()
    call = one.call(size=ONE_TILE, input_dtype=torch.bfloat16, is_fused=True)
    with torch.no_grad():
        apply_head(one.hidden, one.weight, one.bias, call)
    assert written == []
    apply_head(one.hidden, one.weight, one.bias, call).logprobs.sum().backward()
    assert written == [2, gradient]


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


OFFSETS = (0.0, -1.5, 2.0, 0.0)
GROUPS = (0, 0, 1, 2)
LENGTHS = (3, 11, 1, 2)


class Measuring:
    """Keeps the objective of a backward pass."""

    def __init__(self):
        self.recording = Recording(Slots(nn.Module()))
        self.recording.measuring = self
        self.objective = None

    def measure(self, objective):
        self.objective = objective


def objective_of(one, form):
    observer = Measuring()
    call = one.call(FORMS[form], observer=observer)
    found = apply_head(one.hidden, one.weight, one.bias, call).logprobs
    torch.autograd.grad((found * one.weights).sum(), [observer.recording.anchor], allow_unused=True)
    return observer.objective


def gradients_of(one, form):
    """Matrix [batch, vocabulary, hidden] and bias [batch, vocabulary], by autograd."""
    leaves = one.leaves()
    terms = leaves.logprobs(FORMS[form], 0.7) * one.weights
    wanted = [leaves.weight] if leaves.bias is None else [leaves.weight, leaves.bias]
    found = [
        torch.autograd.grad(part.sum(), wanted, retain_graph=True)
        for part in torch.split(terms, one.lengths)
    ]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def sums_like(parameter):
    return GradientSums(
        weighted=torch.zeros_like(parameter), by_group=parameter.new_zeros(4, *parameter.shape)
    )


@pytest.fixture(params=["formed", "products", "by length"])
def way(request, monkeypatch):
    touch = {"formed": -1e9, "products": 1e9, "by length": 12.0}[request.param]
    monkeypatch.setitem(trajectory_gradients._FLOPS_PER_TOUCH, "cpu", touch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_norms_and_sums_are_those_of_autograd_by_trajectory(way, form, has_bias):
    one = case(lengths=LENGTHS, has_bias=has_bias)
    expected = gradients_of(one, form)
    matrix_sums = sums_like(one.weight)
    bias_sums = sums_like(one.bias) if has_bias else None
    measured = TrajectoryGradients(
        objective_of(one, form),
        one.lengths,
        weights=TrajectoryWeights(offsets=OFFSETS, groups=GROUPS),
        matrix_sums=matrix_sums,
        bias_sums=bias_sums,
    )
    measured.measure()
    parts = [(measured.matrix_norms, matrix_sums), (measured.bias_norms, bias_sums)]
    for gradients, (norms, sums) in zip(expected, parts, strict=False):
        torch.testing.assert_close(norms, gradients.flatten(1).square().sum(1), rtol=1e-10, atol=0)
        offsets = torch.tensor(OFFSETS).double()
        weighted = (offsets.view(-1, *[1] * (gradients.ndim - 1)) * gradients).sum(0)
        torch.testing.assert_close(sums.weighted, weighted, rtol=1e-10, atol=1e-12)
        for group in range(4):
            members = [at for at, own in enumerate(GROUPS) if own == group]
            total = gradients[members].sum(0)
            torch.testing.assert_close(sums.by_group[group], total, rtol=1e-10, atol=1e-12)


def test_norms_alone_form_no_sums(way):
    one = case(lengths=LENGTHS)
    measured = TrajectoryGradients(objective_of(one, "plain"), one.lengths)
    measured.measure()
    expected = gradients_of(one, "plain")[0].square().sum((1, 2))
    torch.testing.assert_close(measured.matrix_norms, expected, rtol=1e-10, atol=0)


def test_a_trajectory_of_weight_zero_has_a_norm_of_zero(way):
    one = case(lengths=LENGTHS)
    one.weights[3:14] = 0.0
    measured = TrajectoryGradients(objective_of(one, "plain"), one.lengths)
    measured.measure()
    expected = gradients_of(one, "plain")[0].square().sum((1, 2))
    torch.testing.assert_close(measured.matrix_norms, expected, rtol=1e-10, atol=0)
    assert float(measured.matrix_norms[1]) == 0.0


def test_sums_of_frozen_parameters_are_not_formed(way):
    one = case(lengths=LENGTHS)
    measured = TrajectoryGradients(
        objective_of(one, "plain"),
        one.lengths,
        weights=TrajectoryWeights(offsets=OFFSETS, groups=GROUPS),
    )
    measured.measure()
    assert bool((measured.matrix_norms > 0.0).all())


def test_the_product_with_a_tied_embeddings_gradient(way):
    one = case(lengths=LENGTHS)
    width = 9
    token_ids = torch.randint(0, VOCABULARY, (4, width))
    is_token = torch.arange(width) < torch.tensor([[5], [9], [3], [4]])
    gradients = (
        torch.randn(4, width, one.hidden.shape[1]).double().masked_fill(~is_token[..., None], 0.0)
    )
    rows = own_rows(token_ids, is_token, one.weight, 10, torch.float64)
    measured = TrajectoryGradients(objective_of(one, "plain"), one.lengths, own_rows=rows)
    measured.measure()
    embedding = torch.zeros(4, *one.weight.shape).double()
    for at in range(4):
        embedding[at].index_add_(0, token_ids[at], gradients[at])
    expected = (gradients_of(one, "plain")[0] * embedding).sum((1, 2))
    found = rows.inner_products(token_ids, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_runs_hold_whole_trajectories_or_pieces_of_one():
    runs = runs_of_tokens([2, 1, 5, 1, 3, 2], [True, True, True, True, False, True], 3)
    found = [
        [(at.trajectory, at.tokens.start, at.tokens.stop, at.ends) for at in run] for run in runs
    ]
    assert found == [
        [(0, 0, 2, True), (1, 2, 3, True)],
        [(2, 3, 6, False)],
        [(2, 6, 8, True)],
        [(3, 8, 9, True)],
        [(5, 12, 14, True)],
    ]


def test_a_processor_with_units_multiplies_as_bfloat16_and_only_in_the_block(monkeypatch):
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    monkeypatch.setattr(logit_tiles, "has_units", lambda: True)
    with logit_tiles.of_rounded_numbers():
        assert matmul.fp32_precision == "bf16" != before
    assert matmul.fp32_precision == before
