"""The numbers of a trajectory do not depend on its company: neighbours, padding, packing, split."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fixtures.families import ATTENTION, family
from tests.fixtures.learner.models import trajectory
from vcpo.api.learner import Attention
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.kept_apart import require_kept_apart
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import batch_tokens

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 36), min_size=1, max_size=4)
"""Of responses; windows and chunks end at 8 tokens, and LongRoPE's short factors at 24."""


NO_PACKING = {"gpt-oss", "bloom", "llama4"}
"""Families that `select_attention` does not pack."""


def network_of(kind):
    model = family(kind)
    fix_rotary_table(model)
    return PolicyNetwork(model)


@pytest.fixture(scope="module", params=ATTENTION)
def network(request):
    return network_of(request.param)


@pytest.fixture(scope="module", params=sorted(ATTENTION.keys() - NO_PACKING))
def packable(request):
    model = family(request.param)
    fix_rotary_table(model)
    assert select_attention(model, Attention.AUTO, packs=True)
    return PolicyNetwork(model)


def scores(network, rows, *, packs):
    tokens = batch_tokens(rows, CPU)
    batch = tokens.micro_batch(range(len(rows)), 0, packs=packs)
    with torch.no_grad():
        logprobs = network.score(batch, Wanted()).logprobs
    return torch.split(logprobs, [len(each.response_token_ids) for each in rows])


def responses(lengths):
    return [
        trajectory(number, response=tuple(2 + (7 * at + 5 * number) % 90 for at in range(length)))
        for number, length in enumerate(lengths)
    ]


def assert_as_alone(network, lengths, *, packs):
    rows = responses(lengths)
    together = scores(network, rows, packs=packs)
    for row, found in zip(rows, together, strict=True):
        (alone,) = scores(network, [row], packs=False)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@settings(max_examples=3)
@given(lengths=LENGTHS)
def test_a_trajectory_has_the_same_numbers_in_any_company(network, lengths):
    assert_as_alone(network, lengths, packs=False)


@settings(max_examples=3)
@given(lengths=LENGTHS)
def test_a_trajectory_has_the_same_numbers_anywhere_in_a_row(packable, lengths):
    assert_as_alone(packable, lengths, packs=True)


def test_the_check_before_the_first_step_passes_models_in_rows_of_their_own(network):
    require_kept_apart(network, packs=False)


def test_the_check_before_the_first_step_passes_models_in_packed_rows(packable):
    require_kept_apart(packable, packs=True)


def test_frequencies_that_follow_the_longest_are_seen_without_a_long_pass():
    model = family("phi3 longrope", max_position_embeddings=1 << 17)
    with pytest.raises(StartError, match="the rotary frequencies of Phi3ForCausalLM change when"):
        require_kept_apart(PolicyNetwork(model), packs=False)


class Widening(nn.Module):
    """Scores depend on the width of the batch, as soon as it is beyond a length."""

    def __init__(self, beyond, tokens_below=1 << 30):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.beyond, self.tokens_below = beyond, tokens_below

    def forward(self, input_ids, **_):
        is_wide = input_ids.shape[1] > self.beyond and input_ids.max() < self.tokens_below
        numbers = input_ids + 3.0 * is_wide
        return SimpleNamespace(
            logits=self.weight * numbers[:, :, None] * torch.linspace(0.0, 1.0, 101)
        )


@pytest.mark.parametrize(("packs", "field"), [(False, "model.name"), (True, "batch.rowLayout")])
def test_numbers_that_depend_on_longer_neighbours_are_refused(packs, field):
    message = f"^spec.{field}: .*Widening gives a trajectory of 5 tokens other log-probabilities"
    with pytest.raises(StartError, match=message):
        require_kept_apart(PolicyNetwork(Widening(6)), packs=packs)


class Named(nn.Module):
    """A model of a family, of which the forward pass is another."""

    def __init__(self, model, forward):
        super().__init__()
        self.inner, self.own = model, forward

    def forward(self, input_ids, **options):
        return self.own(input_ids, **options)
