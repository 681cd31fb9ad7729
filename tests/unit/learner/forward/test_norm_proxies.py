import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.fixtures.learner.models import (
    FAMILIES,
    PAD,
    llama,
    own_logprobs,
    seeded_model,
    trajectory,
)
from vcpo_learner.forward.logprobs import token_logprobs, token_logprobs_and_energies
from vcpo_learner.forward.norm_proxies import (
    length_norms,
    lm_head_norms,
    logit_energies,
    logit_energy_norms,
    record_head,
)
from vcpo_learner.forward.token_batch import token_batch

LOGITS = st.lists(st.floats(-20.0, 20.0), min_size=2, max_size=8)


def of_two_trajectories():
    rows = [trajectory(0, response=(5, 6, 7)), trajectory(1, prompt=(2,), response=(8,))]
    return rows, token_batch(rows, PAD, torch.device("cpu"))


def test_the_energy_of_a_likely_token_worked_by_hand():
    # 1 - 2 * 0.7 + (0.49 + 0.04 + 0.01)
    distribution = torch.tensor([0.7, 0.2, 0.1]).double().log()
    assert float(logit_energies(distribution, distribution[0])) == pytest.approx(0.14, rel=1e-6)


def test_the_energy_of_an_unlikely_token_worked_by_hand():
    # 1 - 2 * 0.1 + 0.54
    distribution = torch.tensor([0.7, 0.2, 0.1]).double().log()
    assert float(logit_energies(distribution, distribution[2])) == pytest.approx(1.34, rel=1e-6)


@given(logits=LOGITS)
def test_energies_are_squared_gradients_of_the_log_softmax(logits):
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    distribution = leaf.log_softmax(0)
    (gradient,) = torch.autograd.grad(distribution[1], leaf)
    found = logit_energies(distribution.detach(), distribution[1].detach())
    assert float(found) == pytest.approx(float(gradient @ gradient), abs=1e-12)


def test_energies_are_weighed_by_the_squares_of_the_tokens_weights():
    # 4 * 0.14 + 9 * 1.34, and nothing
    weights = torch.tensor([[2.0, 3.0, 0.0], [0.0, 0.0, 0.0]]).double()
    energies = torch.tensor([[0.14, 1.34, 5.0], [1.0, 1.0, 1.0]]).double()
    found = logit_energy_norms(weights, energies).tolist()
    assert found == pytest.approx([12.62, 0.0])


def test_a_mean_over_four_times_the_tokens_has_a_quarter_of_the_squared_norm():
    weights = torch.zeros(2, 8)
    weights[0, :2], weights[1] = 1 / 2, 1 / 8
    assert length_norms(weights).tolist() == [0.5, 0.125]


def test_the_norm_of_a_head_worked_by_hand():
    # Inputs (1,0),(1,2) and output gradients (1,1),(0,2): G = [[1,0],[3,4]], squared norm 26.
    inputs = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])
    output_gradients = torch.tensor([[[1.0, 1.0], [0.0, 2.0]]])
    assert lm_head_norms(inputs, output_gradients).tolist() == [26.0]


@pytest.mark.parametrize("tokens", [1, 2, 50], ids="{} tokens".format)
def test_short_and_long_sequences_have_the_norm_of_the_summed_outer_products(tokens):
    torch.manual_seed(0)
    inputs, gradients = torch.randn(3, tokens, 4).double(), torch.randn(3, tokens, 5).double()
    expected = torch.einsum("btv,bth->bvh", gradients, inputs).square().sum(dim=(1, 2))
    torch.testing.assert_close(lm_head_norms(inputs, gradients), expected, rtol=1e-12, atol=0.0)


def test_a_trajectory_without_a_gradient_has_a_head_norm_of_zero():
    assert lm_head_norms(torch.ones(1, 3, 2), torch.zeros(1, 3, 4)).tolist() == [0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_norm_is_that_of_its_own_use_of_its_matrix(family):
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    rows, batch = of_two_trajectories()
    head = model.get_output_embeddings()
    separate = head.weight.detach().clone().requires_grad_()
    expected = []
    for row in rows:
        with torch.no_grad():
            tokens = torch.tensor([[*row.prompt_token_ids, *row.response_token_ids]])
            states = model.base_model(tokens).last_hidden_state[0]
        distributions = (states @ separate.T).log_softmax(-1)
        start = len(row.prompt_token_ids) - 1
        picked = [distributions[start + t, y] for t, y in enumerate(row.response_token_ids)]
        (gradient,) = torch.autograd.grad(torch.stack(picked).mean(), separate)
        expected.append(float(gradient.square().sum()))
    with record_head(model) as recorded:
        logprobs = token_logprobs(model, batch, temperature=1.0)
    means = logprobs.sum(dim=1) / batch.response_mask.sum(dim=1)
    assert recorded.squared_norms(means.sum()).tolist() == pytest.approx(expected, rel=1e-9)


def test_the_graph_is_left_for_the_backward_pass():
    model = seeded_model(llama)
    _, batch = of_two_trajectories()
    with record_head(model) as recorded:
        total = token_logprobs(model, batch, temperature=1.0).sum()
    recorded.squared_norms(total)
    assert all(parameter.grad is None for parameter in model.parameters())
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_frozen_head_has_a_norm_too():
    model = seeded_model(llama)
    model.lm_head.requires_grad_(False)
    _, batch = of_two_trajectories()
    with record_head(model) as recorded:
        total = token_logprobs(model, batch, temperature=1.0).sum()
    assert min(recorded.squared_norms(total).tolist()) > 0.0


def test_energies_come_with_the_log_probabilities_of_the_same_pass():
    model = seeded_model(llama, dtype=torch.float64)
    rows, batch = of_two_trajectories()
    logprobs, energies = token_logprobs_and_energies(model, batch, temperature=0.6)
    torch.testing.assert_close(
        logprobs[0, 2:], own_logprobs(model, rows[0], temperature=0.6), rtol=1e-9, atol=0.0
    )
    logits = model(torch.tensor([[2, 8]])).logits[0, 0].detach() / 0.6
    gradient = -logits.softmax(0)
    gradient[8] += 1.0
    assert float(energies[1, 1]) == pytest.approx(float(gradient @ gradient), rel=1e-9)


def test_energies_are_zero_outside_the_response_and_carry_no_graph():
    _, batch = of_two_trajectories()
    _, energies = token_logprobs_and_energies(seeded_model(llama), batch, temperature=1.0)
    assert energies[~batch.response_mask].tolist() == [0.0] * 6
    assert not energies.requires_grad


def test_a_model_without_an_output_head_is_refused():
    with (
        pytest.raises(ValueError, match=r"model Linear names no output head .* use 'exact'"),
        record_head(nn.Linear(2, 2)),
    ):
        pass


def test_a_head_that_was_not_called_is_refused():
    with record_head(seeded_model(llama)) as recorded:
        pass
    with pytest.raises(ValueError, match="called 0 times with a gradient"):
        recorded.squared_norms(torch.zeros(()))
