import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.models import (
    PAD,
    llama,
    own_logprobs,
    seeded_model,
    token_logprobs_and_energies,
    trajectory,
)
from vcpo_learner.forward.norm_proxies import logit_energies, logit_energy_norms
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
