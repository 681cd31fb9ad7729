from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.unit.update.models import FAMILIES, PAD, own_logprobs, sampled_groups, seeded, trajectory
from vcpo_learner.batch import token_batch
from vcpo_learner.scoring import mean_response_logprobs, response_logprobs, token_logprobs

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
    model = seeded(FAMILIES[family], dtype=torch.float64)
    trajectories = [one for group in sampled_groups(model) for one in group]
    batch = token_batch(trajectories, PAD, CPU)
    rows = response_logprobs(token_logprobs(model, batch, temperature=0.7), batch)
    alone = [own_logprobs(model, one, temperature=0.7).tolist() for one in trajectories]
    for padded, expected in zip(rows, alone, strict=True):
        assert padded == pytest.approx(expected, rel=1e-9)


def test_bfloat16_logits_are_normalized_in_float32():
    model = Unigram(torch.randn(50, generator=torch.manual_seed(0)).bfloat16())
    batch = token_batch([trajectory(0, prompt=(1,), response=(2,))], PAD, CPU)
    (row,) = response_logprobs(token_logprobs(model, batch, temperature=1.0), batch)
    logits = model.logits.detach().double()
    assert row[0] == pytest.approx(float(logits[2] - logits.logsumexp(0)), rel=1e-6)


def test_the_mean_is_over_a_trajectorys_own_tokens():
    model = Unigram(torch.tensor([1.0, 3.0]).log())
    pair = [trajectory(0, response=(1,)), trajectory(1, response=(1, 0, 0))]
    batch = token_batch(pair, 0, CPU)
    means = mean_response_logprobs(token_logprobs(model, batch, temperature=1.0), batch)
    expected = torch.tensor([0.75, (0.75 * 0.25 * 0.25) ** (1 / 3)]).log()
    torch.testing.assert_close(means, expected)
