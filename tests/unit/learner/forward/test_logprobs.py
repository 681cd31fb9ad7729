import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import (
    FAMILIES,
    PAD,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
    trajectory,
)
from vcpo_learner.forward.logprobs import (
    prefix_states,
    token_entropies,
    token_logprobs,
    weighted_logprobs,
)
from vcpo_learner.forward.token_batch import token_batch

CPU = torch.device("cpu")


class Unigram(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_logprobs_are_of_the_softmax_at_the_temperature():
    # Logits log 1 and log 4 at temperature 2: odds 1 to 2.
    model = Unigram(torch.tensor([1.0, 4.0]).log().double())
    batch = token_batch([trajectory(0, prompt=(0,), response=(1, 0))], 0, CPU)
    logprobs = token_logprobs(model, batch, temperature=2.0)
    expected = torch.tensor([[0.0, 2 / 3, 1 / 3]]).double()
    torch.testing.assert_close(logprobs[:, 1:].exp(), expected[:, 1:])


def test_logprobs_are_zero_outside_the_response():
    model = Unigram(torch.zeros(9))
    short, long = trajectory(0, response=(5,)), trajectory(1, response=(5, 6, 7))
    batch = token_batch([short, long], PAD, CPU)
    logprobs = token_logprobs(model, batch, temperature=1.0)
    assert torch.equal(logprobs != 0.0, batch.response_mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_change_a_trajectorys_logprobs(family):
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    trajectories = [one for group in sampled_groups(model) for one in group]
    batch = token_batch(trajectories, PAD, CPU)
    found = batch.select_trained(token_logprobs(model, batch, temperature=0.7))
    alone = torch.cat([own_logprobs(model, one, temperature=0.7) for one in trajectories])
    assert found.tolist() == pytest.approx(alone.tolist(), rel=1e-9)


def test_bfloat16_logits_are_normalized_in_float32():
    model = Unigram(torch.randn(50, generator=torch.manual_seed(0)).bfloat16())
    batch = token_batch([trajectory(0, prompt=(1,), response=(2,))], PAD, CPU)
    row = batch.select_trained(token_logprobs(model, batch, temperature=1.0)).tolist()
    logits = model.logits.detach().double()
    assert row[0] == pytest.approx(float(logits[2] - logits.logsumexp(0)), rel=1e-6)


def test_a_token_of_weight_zero_takes_no_part_even_when_it_is_impossible():
    logprobs = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    weighted_logprobs(logprobs, torch.tensor([[2.0, 0.0]])).sum().backward()
    assert logprobs.grad.tolist() == [[2.0, 0.0]]


def test_weights_are_held_constant():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    weighted_logprobs(logprobs, logprobs.square()).sum().backward()
    assert logprobs.grad.tolist() == [[1.0, 4.0]]


def test_entropies_are_of_the_distribution_that_a_token_was_drawn_against():
    # Probabilities 1/4 and 3/4: H = ln 4 - 3/4 ln 3.
    model = Unigram(torch.tensor([1.0, 3.0]).log())
    batch = token_batch([trajectory(0, response=(1, 0))], 0, CPU)
    row = batch.select_trained(token_entropies(model, batch, temperature=1.0)).tolist()
    assert row == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2)


def test_the_state_before_a_token_is_that_of_the_token_before_it():
    model = seeded_model(llama, dtype=torch.float64)
    one = trajectory(0, prompt=(3, 4), response=(5, 6))
    batch = token_batch([one], PAD, CPU)
    states = prefix_states(model, batch)
    hidden = model(torch.tensor([[3, 4, 5, 6]]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(states[0, 2:], hidden[0, 1:3])
