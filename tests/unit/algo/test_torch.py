"""The rules of VCPO on tensors, for a loop of one's own."""

from __future__ import annotations

import math
import runpy

import pytest
import torch

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.torch import StepRule, opob_advantages, truncated_weights, vcpo2_advantages

REWARDS = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
NORMS = torch.tensor([[3.0, 1.0], [2.0, 2.0]])


def make_optimizer(rate: float = 0.5) -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=rate)


def position(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].detach())


def test_weights_are_truncated_and_have_no_gradient():
    log_weights = torch.tensor([math.log(20.0), math.log(0.5)], requires_grad=True)
    weights = truncated_weights(log_weights)
    torch.testing.assert_close(weights, torch.tensor([8.0, 0.5]))
    assert not weights.requires_grad


def test_opob_weighs_each_prompts_rewards_by_squared_norms():
    # b* = 3 * 1 / (3 + 1) of the first prompt; equal rewards have no advantage.
    expected = torch.tensor([[0.25, -0.75], [0.0, 0.0]])
    torch.testing.assert_close(opob_advantages(REWARDS, NORMS), expected)


def test_vcpo2_has_one_baseline_for_the_batch_lowered_by_what_it_does_not_show():
    log_weights = torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])
    # b* = 7 / 8 over the batch, C = 1/2 and min R = 0: the baseline is 7 / 16.
    expected = REWARDS - 7 / 16
    torch.testing.assert_close(vcpo2_advantages(REWARDS, NORMS, log_weights), expected)


def test_vcpo_steps_at_the_root_of_the_ess_ratio_and_restores_the_rate():
    optimizer = make_optimizer()
    rule = StepRule(optimizer, max_lag_steps=8, method="vcpo")
    # Weights 1 and 0: ESS 1 of 2.
    report = rule.step(torch.tensor([0.0, -math.inf]), torch.tensor([3, 3]))
    assert report.ess_ratio == 0.5
    assert report.rate == pytest.approx(0.5 * math.sqrt(0.5))
    assert position(optimizer) == pytest.approx(-report.rate)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_vcpo2_starts_at_a_share_of_the_rate_and_doubles_while_data_stays_fresh():
    rule = StepRule(make_optimizer(), max_lag_steps=64)
    fresh = torch.zeros(4), torch.zeros(4)
    assert [rule.step(*fresh).scale * 64 for _ in range(3)] == [1.0, 2.0, 4.0]


def test_a_weight_without_a_value_is_refused_before_the_step():
    optimizer = make_optimizer()
    with pytest.raises(NonFiniteWeightError):
        StepRule(optimizer, max_lag_steps=1).step(torch.tensor([math.nan]), torch.tensor([0]))
    assert position(optimizer) == 0.0


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method is 'grpo': give 'vcpo2' or 'vcpo'"):
        StepRule(make_optimizer(), max_lag_steps=1, method="grpo")


def test_the_plain_loop_learns_its_task(capsys):
    torch.manual_seed(0)
    rewards = runpy.run_path("examples/plain_loop.py")["train"](80)
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert capsys.readouterr().out.count("reward") == 4
