import pytest
import torch

from tests.unit.learner.output_head.heads import FORMS, VOCABULARY, case
from vcpo_learner.output_head import trajectory_gradients
from vcpo_learner.output_head.gradient_tiles import runs_of_tokens
from vcpo_learner.output_head.own_rows import own_rows
from vcpo_learner.output_head.tiled_head import apply_head
from vcpo_learner.output_head.trajectory_gradients import (
    GradientSums,
    TrajectoryGradients,
    TrajectoryWeights,
)

OFFSETS = (0.0, -1.5, 2.0, 0.0)
GROUPS = (0, 0, 1, 2)
LENGTHS = (3, 11, 1, 2)


class Measuring:
    """Keeps the objective of a backward pass."""

    def __init__(self):
        self.anchor = torch.zeros((), requires_grad=True)
        self.is_measuring = True
        self.objective = None

    def measure(self, objective):
        self.objective = objective


def objective_of(one, form):
    observer = Measuring()
    call = one.call(FORMS[form], observer=observer)
    found = apply_head(one.hidden, one.weight, one.bias, call).logprobs
    torch.autograd.grad((found * one.weights).sum(), [observer.anchor], allow_unused=True)
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
        weighted=torch.zeros_like(parameter),
        by_group=parameter.new_zeros(4, *parameter.shape),
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
