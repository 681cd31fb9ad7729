"""The learner computes with the experts that the rollout worker's routers chose."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import (
    MIXTURES,
    PAD,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
    trajectory,
)
from tests.fixtures.learner.updates import make_spec
from vcpo.api.learner import ActivationCheckpointing
from vcpo.service.lifecycle import StartError
from vcpo.wire.packing import ExpertRoutes
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.forward_pass import forward_pass, token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.replayable import require_replayable
from vcpo_learner.forward.router_replay import router_layout, routers_by_layer
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.update.policy_update import PolicyUpdate

CPU = torch.device("cpu")
EVERY_MIXTURE = pytest.mark.parametrize("family", MIXTURES)


def routes_of(numbers):
    """numbers: [tokens, layers, choices]."""
    return ExpertRoutes(
        experts=numbers.to(torch.uint8).numpy().tobytes(),
        num_layers=numbers.shape[1],
        num_choices=numbers.shape[2],
    )


def chosen(model, tokens):
    """What the routers of a model choose for a row of tokens, [tokens, layers, choices]."""
    found = {}
    handles = [
        router.register_forward_hook(lambda *given, layer=layer: found.update({layer: given[2][2]}))
        for layer, router in routers_by_layer(model).items()
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack([found[layer] for layer in sorted(found)], dim=1)


def with_routes(model, one):
    tokens = [*one.prompt_token_ids, *one.response_token_ids]
    return replace(one, expert_routes=routes_of(chosen(model, tokens)))


def with_other_routers(model):
    """The model with routers that choose other experts, and all else equal."""
    torch.manual_seed(7)
    for router in routers_by_layer(model).values():
        nn.init.normal_(router.weight)
    return model


def looped(model, trajectories, routers):
    """Log-probabilities with the choices of `routers`, written out layer by layer."""
    rows = []
    for one in trajectories:
        tokens = [*one.prompt_token_ids, *one.response_token_ids]
        choices = chosen(routers, tokens)
        handles = [
            router.register_forward_hook(partial(by_hand, choices[:, layer]))
            for layer, router in routers_by_layer(model).items()
        ]
        rows.append(own_logprobs(model, one))
        for handle in handles:
            handle.remove()
    return torch.cat(rows)


def by_hand(choices, router, inputs, _):
    """A hook: softmax of all scores, of which the chosen are scaled to 1."""
    (states,) = inputs
    logits = states.reshape(-1, states.shape[-1]) @ router.weight.T
    weights = logits.float().softmax(dim=-1).gather(1, choices)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), choices


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@EVERY_MIXTURE
def test_tokens_are_scored_with_the_given_experts(family, packs):
    model, sampler = (seeded_model(MIXTURES[family], dtype=torch.float64) for _ in range(2))
    with_other_routers(sampler)
    group = sampled_groups(sampler)[0]
    given = [with_routes(sampler, one) for one in group]
    plain, replayed = (
        token_logprobs(model, batch, temperature=1.0)[batch.response_mask]
        for batch in (token_batch(each, PAD, CPU, packs=packs) for each in (group, given))
    )
    torch.testing.assert_close(replayed, looped(model, group, sampler), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(replayed, plain, atol=1e-3)


@EVERY_MIXTURE
def test_a_policy_that_replays_its_own_routes_is_itself(family):
    model = seeded_model(MIXTURES[family])
    group = sampled_groups(model)[0]
    given = [with_routes(model, one) for one in group]
    plain, replayed = (
        token_logprobs(model, token_batch(each, PAD, CPU), temperature=1.0)
        for each in (group, given)
    )
    torch.testing.assert_close(replayed, plain, rtol=1e-6, atol=1e-6)


@EVERY_MIXTURE
def test_routers_choose_for_themselves_behind_the_given_routes_and_without_any(family):
    model = seeded_model(MIXTURES[family])
    one, other = sampled_groups(model)[0][:2]
    known = with_routes(model, one)
    first = routes_of(chosen(model, [*one.prompt_token_ids, *one.response_token_ids])[:1])
    plain = token_logprobs(model, token_batch([one, other], PAD, CPU), temperature=1.0)
    for given in ([known, other], [replace(one, expert_routes=first), other]):
        found = token_logprobs(model, token_batch(given, PAD, CPU), temperature=1.0)
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["once", "computed again"])
@EVERY_MIXTURE
def test_norms_with_given_experts_are_autograds(family, checkpoints):
    model, sampler = seeded_model(MIXTURES[family]), seeded_model(MIXTURES[family])
    with_other_routers(sampler)
    group = sampled_groups(sampler)[0]
    batch = token_batch([with_routes(sampler, one) for one in group], PAD, CPU, packs=True)
    if checkpoints:
        set_checkpoints(model, ActivationCheckpointing.LAYERS)
    network, slots = PolicyNetwork(model), Slots(model)
    passed = forward_pass(network, slots, batch, measures_norms=True, temperature=1.0)
    found = passed.measure(batch.response_mask.float()).squared_norms
    set_checkpoints(model, ActivationCheckpointing.NONE)
    expected = []
    for one in group:
        gradients = torch.autograd.grad(
            looped(model, [one], sampler).sum(), list(model.parameters()), materialize_grads=True
        )
        expected.append(sum(float(each.double().square().sum()) for each in gradients))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_step_trains_the_experts_that_were_given():
    model, sampler = (seeded_model(MIXTURES["qwen3 moe"]) for _ in range(2))
    with_other_routers(sampler)
    groups = [[with_routes(sampler, one) for one in group] for group in sampled_groups(sampler)]
    spec = make_spec(routerReplay=True)
    result = PolicyUpdate(model, spec, PAD).step(groups, policy_version=9)
    unaware = PolicyUpdate(seeded_model(MIXTURES["qwen3 moe"]), make_spec(), PAD).step(
        [[replace(one, expert_routes=None) for one in group] for group in groups], policy_version=9
    )
    assert result.skipped is None
    assert result.gradient_norm != pytest.approx(unaware.gradient_norm, rel=1e-3)


def test_the_layout_of_a_models_routes():
    assert router_layout(seeded_model(MIXTURES["mixtral"])) == (2, 2, 4)
    assert router_layout(llama()) is None


def test_a_model_without_routers_is_refused_with_the_cure():
    with pytest.raises(
        StartError, match=r"routerReplay: true, but LlamaForCausalLM has no routers"
    ):
        require_replayable(PolicyNetwork(seeded_model(llama)))


def test_routers_that_do_not_listen_are_refused():
    model = seeded_model(MIXTURES["mixtral"])
    for router in routers_by_layer(model).values():

        def forward(states, router=router):
            logits = states @ router.weight.T
            weights, choices = logits.softmax(dim=-1).sort(dim=-1, descending=True)
            return logits, weights[:, :2], choices[:, :2]

        router.forward = forward
    with pytest.raises(StartError, match="cannot be told what to choose; use false"):
        require_replayable(PolicyNetwork(model))


def test_wide_numbers_are_read_in_order():
    routes = ExpertRoutes(
        experts=torch.tensor([300, 2, 5, 1]).to(torch.uint16).numpy().tobytes(),
        num_layers=1,
        num_choices=2,
        is_wide=True,
    )
    batch = token_batch([replace(trajectory(0), expert_routes=routes)], PAD, CPU)
    assert batch.expert_routes[0, :, 0].tolist() == [[300, 2], [5, 1], [-1, -1], [-1, -1], [-1, -1]]
