"""Rotary frequencies are those of the run's context, whatever a pass holds."""

import math

import pytest
import torch

from tests.fixtures.families import LONG_FACTOR, ORIGINAL, family
from vcpo.service.rotary_table import fix_rotary_table, table_length

CONTEXT = 512


def cosines(model, positions):
    table, _ = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]))
    return table[0, :, :8]


def expected(positions, *, factor):
    """Phi-3's rule, by hand: 8 frequencies of heads of 16, and one scale for all lengths."""
    scale = math.sqrt(1 + math.log(CONTEXT / ORIGINAL) / math.log(ORIGINAL))
    frequencies = [1 / (factor * 1e4 ** (2 * pair / 16)) for pair in range(8)]
    return torch.tensor([[scale * math.cos(at * each) for each in frequencies] for at in positions])


@pytest.mark.parametrize(
    ("context_tokens", "factor"),
    [(None, LONG_FACTOR), (ORIGINAL + 1, LONG_FACTOR), (ORIGINAL, 1.0), (CONTEXT, LONG_FACTOR)],
)
def test_the_factors_of_longrope_follow_from_the_context_of_the_run(context_tokens, factor):
    model = family("phi3 longrope")
    before = model.config.to_dict()
    fix_rotary_table(model, context_tokens)
    for positions in ([0, 1, 2], [0, 5, ORIGINAL - 1], [ORIGINAL - 1]):
        torch.testing.assert_close(cosines(model, positions), expected(positions, factor=factor))
    assert model.config.to_dict() == before


def test_a_table_of_one_length_is_made_where_the_kind_needs_one():
    assert table_length(family("phi3 longrope").config) == CONTEXT
    assert table_length(family("phi3 longrope").config, 30) == 30
    # Beyond its context a model has no positions.
    assert table_length(family("llama dynamic").config, 1000) == 40
    assert table_length(family("gemma3").config, 30) is None
