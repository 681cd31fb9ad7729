"""Steps whose baseline uses `logitEnergy`, against an independent computation."""

import math

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import PAD, llama, own_logprobs, sampled_groups, seeded_model
from tests.fixtures.learner.updates import (
    CAP,
    by_hand,
    contribution,
    gradient_of_step,
    make_spec,
    with_micro_batches,
)
from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.policy_update import PolicyUpdate


def energy_by_hand(model: nn.Module, one: Trajectory) -> float:
    """Of one trajectory alone, per unit of advantage."""
    logprobs = own_logprobs(model, one)
    log_weight = float(logprobs.detach().sum()) - math.fsum(one.rollout_logprobs)
    weight = min(math.exp(log_weight), CAP)
    start = len(one.prompt_token_ids)
    tokens = torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]])
    errors = -model(tokens).logits.detach()[0, start - 1 : -1].softmax(-1)
    for t, token in enumerate(one.response_token_ids):
        errors[t, token] += 1.0
    return float(errors.square().sum()) * (weight / len(logprobs)) ** 2


def expected_gradient(model, groups, *, over_batch=False):
    sharing = [[one for group in groups for one in group]] if over_batch else groups
    total = torch.zeros(())
    for group in sharing:
        proxies = [energy_by_hand(model, one) for one in group]
        weighed = by_hand("opob", [one.reward for one in group], proxies, [1.0] * len(group))
        for advantage, one in zip(weighed, group, strict=True):
            total = total - advantage * contribution(model, one)
    return total / sum(len(group) for group in groups)


def assert_same(gradient, expected):
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
def test_a_groups_baseline_weighs_by_the_proxy(micro_batch):
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups)
    spec = with_micro_batches(make_spec(gradientNorms="logitEnergy"), micro_batch)
    assert_same(gradient_of_step(model, spec, groups), expected)


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
def test_a_batchs_baseline_weighs_by_the_proxy(micro_batch):
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, over_batch=True)
    spec = make_spec(gradientNorms="logitEnergy", baselineScope="batch")
    assert_same(gradient_of_step(model, with_micro_batches(spec, micro_batch), groups), expected)


def test_every_estimator_leads_to_a_gradient_of_its_own():
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    gradients = [
        gradient_of_step(
            seeded_model(llama, dtype=torch.float64), make_spec(gradientNorms=estimator), groups
        )
        for estimator in ("logitEnergy", "exact")
    ]
    distances = [float((a - b).norm()) for a in gradients for b in gradients if a is not b]
    assert min(distances) > 1e-3 * float(gradients[0].norm())


class WithUnseenUse(nn.Module):
    """Scales the hidden states by a parameter of a module that is never called."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scales = model, nn.Linear(1, 1, bias=False)

    def forward(self, **inputs):
        output = self.model(**inputs)
        output.logits = output.logits * self.scales.weight
        return output


def test_a_proxy_serves_models_whose_norms_cannot_be_measured():
    model = WithUnseenUse(seeded_model(llama, dtype=torch.float64)).double()
    groups = sampled_groups(model.model)
    with pytest.raises(
        StartError, match=r"the gradient of 'scales.weight' was lost: it is used outside"
    ):
        PolicyUpdate(model, make_spec(), PAD)
    update = PolicyUpdate(model, make_spec(gradientNorms="logitEnergy"), PAD)
    assert update.step(groups, policy_version=9).skipped is None
