"""A model with rows that no token has, against the same model without them."""

import copy

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import HEADS, PAD, VOCABULARY, seeded_model, trajectory
from tests.fixtures.vocabularies import tokenizer_of
from vcpo.api.workloads import Lora
from vcpo.service.vocabulary import keep_vocabulary
from vcpo_learner.forward.forward_pass import forward_pass, token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.output_head import logit_tiles
from vcpo_learner.output_head.logit_tiles import TileSize
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum

TOKENS = (*range(2, 9), 11, 12, 13, 15)
"""Of the 23 rows: ids 0, 1, 9, 10 and 14 are holes, and those from 16 on have no token."""
SPARE = [each for each in range(VOCABULARY) if each not in TOKENS]
ROWS = [
    {"prompt": (3, 4), "response": (5, 6, 15)},
    {"prompt": (2,), "response": (8,)},
    {"prompt": (12,), "response": (13, 11)},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles whose borders are holes, inside a run of them, and the end of the tokens."""
    monkeypatch.setitem(logit_tiles._TILE_SIZES, "cpu", TileSize(tokens=2, vocabulary=2))


def batch_of(ids, *, packs):
    """The trajectories, with each id replaced by its place in `ids`."""
    rows = [
        trajectory(
            number,
            **{part: tuple(ids.index(each) for each in tokens) for part, tokens in row.items()},
        )
        for number, row in enumerate(ROWS)
    ]
    return token_batch(rows, PAD, torch.device("cpu"), packs=packs)


def padded(family):
    """A model whose spare rows are huge."""
    model = seeded_model(HEADS[family]).double()
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[SPARE] = 1e6
            if getattr(layer, "bias", None) is not None:
                layer.bias[SPARE] = 1e6
    return model


def cut(model):
    """The same model with the rows of tokens only."""
    model = copy.deepcopy(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    embedding.weight = nn.Parameter(embedding.weight[list(TOKENS)].detach())
    head.weight = embedding.weight if is_tied else nn.Parameter(head.weight[list(TOKENS)].detach())
    head.out_features = len(TOKENS)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[list(TOKENS)].detach())
    embedding.padding_idx = None
    return model


def of_tokens(gradients):
    """The rows of tokens of what has a row for each id; the other rows must be 0."""
    found = {}
    for name, each in gradients.items():
        found[name] = each
        if len(each) == VOCABULARY:
            assert not each[SPARE].any(), name
            found[name] = each[list(TOKENS)]
    return found


def measured(model, batch, *, tiles):
    """Scores, norms and the weighted sum of the gradients of a batch."""
    network, slots = PolicyNetwork(model), Slots(model)
    wanted = Wanted(temperature=0.7, entropies=True, tiles=tiles)
    scores = network.score(batch, wanted)
    weights = torch.linspace(0.5, 1.5, batch.response_mask.numel(), dtype=torch.float64)
    weights = weights.view(batch.response_mask.shape) * batch.response_mask
    sums = WeightedSum(
        offsets=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64),
        groups=[0, 0, 1],
        sums=ParameterSums(slots, 2),
    )
    passed = forward_pass(network, slots, batch, measures_norms=True, temperature=0.7, tiles=tiles)
    found = passed.measure(weights, sums)
    found.add_to_parameters([0.3, -0.2])
    return (
        [each.detach() for each in scores],
        found.squared_norms,
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    )


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tiles", [False, True], ids=["full", "tiled"])
@pytest.mark.parametrize("family", ["llama", "qwen2 tied", "Gemma 2", "Phi, with a bias"])
def test_numbers_are_those_of_a_model_without_the_rows(family, tiles, packs):
    model = padded(family)
    alone = cut(model)
    keep_vocabulary(model, tokenizer_of(TOKENS))
    ids = list(range(VOCABULARY))
    found = measured(model, batch_of(ids, packs=packs), tiles=tiles)
    expected = measured(alone, batch_of(list(TOKENS), packs=packs), tiles=tiles)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_tokens(found[2]), expected[2], rtol=1e-8, atol=1e-11)


def test_tiles_are_used_whatever_the_spare_rows_are():
    model = padded("llama")
    keep_vocabulary(model, tokenizer_of(range(16)))
    network = PolicyNetwork(model)
    network.compare_head()
    assert network.is_tiled


def test_an_adapted_head_leaves_the_rows_out_too():
    model = padded("llama")
    keep_vocabulary(model, tokenizer_of(TOKENS))
    plain = batch_of(list(range(VOCABULARY)), packs=False)
    expected = token_logprobs(model, plain, temperature=1.0)
    add_adapters(model, Lora(rank=2, targetModules=["lm_head"]))
    found = token_logprobs(model, plain, temperature=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
