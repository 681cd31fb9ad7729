"""A network's tiles against the model's own full logits."""

import logging

import pytest
import torch

from tests.fixtures.learner.models import HEADS, PAD, VOCABULARY, llama, seeded_model, trajectory
from vcpo.api.workloads import Lora
from vcpo_learner.forward import policy_network
from vcpo_learner.forward.forward_pass import prefix_states, token_entropies, token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.output_head import logit_tiles


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setitem(policy_network.SMALL_LOGITS, "cpu", 0)


def batch_of_three(*, packs=False):
    rows = [
        trajectory(0, response=(5, 6, 7)),
        trajectory(1, prompt=(2,), response=(8,)),
        trajectory(2, prompt=(9,), response=(3,)),
    ]
    return token_batch(rows, PAD, torch.device("cpu"), packs=packs)


def tiled(model):
    network = PolicyNetwork(model)
    network.compare_head()
    assert network.has_tiles(batch_of_three())
    return network


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", HEADS)
def test_tiles_give_the_numbers_of_full_logits(family, packs):
    model, batch = seeded_model(HEADS[family]).double(), batch_of_three(packs=packs)
    network = tiled(model)
    found = token_logprobs(network, batch, temperature=0.7)
    expected = token_logprobs(model, batch, temperature=0.7)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    weights = torch.rand(found.shape, dtype=found.dtype)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    full = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    for ours, theirs in zip(gradients, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_entropies_and_states_are_those_of_full_logits():
    model, batch = seeded_model(llama, dtype=torch.float64), batch_of_three()
    network = tiled(model)
    found, expected = (token_entropies(one, batch, temperature=0.7) for one in (network, model))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(prefix_states(network, batch), prefix_states(model, batch))


def test_the_models_own_head_is_never_called():
    model = seeded_model(llama)
    network = tiled(model)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    token_logprobs(network, batch_of_three(), temperature=1.0).sum().backward()
    assert not calls
    token_logprobs(model, batch_of_three(), temperature=1.0)
    assert calls


def test_few_logits_are_computed_at_once(monkeypatch):
    monkeypatch.setitem(policy_network.SMALL_LOGITS, "cpu", 3 * 5 * VOCABULARY)
    network = PolicyNetwork(seeded_model(llama))
    network.compare_head()
    assert not network.has_tiles(batch_of_three())
    wider = token_batch([trajectory(0, response=(5,) * 14)], PAD, torch.device("cpu"))
    assert network.has_tiles(wider)


def test_adapters_below_a_plain_head_keep_its_tiles():
    model = seeded_model(llama)
    add_adapters(model, Lora(rank=2, targetModules=["q_proj"]))
    network = tiled(model)
    token_logprobs(network, batch_of_three(), temperature=1.0).sum().backward()
    trained = [name for name, each in model.named_parameters() if each.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)


def test_an_adapted_head_computes_full_logits_and_says_so_once(caplog):
    model = seeded_model(llama)
    add_adapters(model, Lora(rank=2, targetModules=["lm_head"]))
    network = PolicyNetwork(model)
    with caplog.at_level(logging.WARNING):
        network.compare_head()
    (message,) = caplog.messages
    assert "LlamaForCausalLM: full logits are computed" in message
    assert "no known kind" in message
    assert not network.has_tiles(batch_of_three())


def test_a_head_whose_numbers_differ_computes_full_logits(caplog):
    model = seeded_model(llama)
    model.config.logit_scale = 2.0  # named like Cohere's, and not applied
    network = PolicyNetwork(model)
    with caplog.at_level(logging.WARNING):
        network.compare_head()
    assert "log-probabilities differ by" in caplog.messages[0]
    assert not network.has_tiles(batch_of_three())


def test_bfloat16_parameters_have_tiles():
    model = seeded_model(llama).bfloat16()
    network = tiled(model)
    found = token_logprobs(network, batch_of_three(), temperature=1.0)
    assert found.dtype is torch.float32
    exact = token_logprobs(seeded_model(llama), batch_of_three(), temperature=1.0)
    torch.testing.assert_close(found, exact, rtol=0.0, atol=0.1)


def test_autocast_reaches_the_tiles():
    model = seeded_model(llama)
    network = tiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(network, batch_of_three(), temperature=1.0)
    exact = token_logprobs(network, batch_of_three(), temperature=1.0)
    assert found.dtype is torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.0, atol=0.1)


KERNELS = {"_add_tile", "_gradient"}


@pytest.mark.parametrize("name", [*sorted(KERNELS), "none of them"])
def test_kernels_with_other_numbers_or_gradients_are_not_used(name, monkeypatch):
    asked = set()

    def run(function, products, *rest):
        asked.add(function.__name__)
        return function(products * (1.001 if function.__name__ == name else 1.0), *rest)

    monkeypatch.setattr(logit_tiles, "run", run)
    network = tiled(seeded_model(llama))
    assert asked == KERNELS
    asked.clear()
    token_logprobs(network, batch_of_three(), temperature=1.0).sum().backward()
    assert asked == (set() if name in KERNELS else KERNELS)


def test_kernels_that_cannot_be_made_leave_a_heads_tiles_and_say_why(monkeypatch, caplog):
    monkeypatch.setattr(logit_tiles, "run", lambda *_: 1 / 0)
    with caplog.at_level(logging.INFO):
        tiled(seeded_model(llama))
    assert "ZeroDivisionError: division by zero" in caplog.messages[0]
