"""Losses of other groups against their formulas by autograd, and against numbers by hand."""

import math
from dataclasses import replace

import pytest
import torch

from research import losses
from vcpo.algo.methods import LossConfig
from vcpo_learner.estimator.record import BatchRecord, BatchSize

CONFIG = LossConfig()
MU = math.log(0.25)


def record_of(log_ratios, *, mu=MU):
    """A batch whose target policy is off the behavior policy by these nats per token."""
    gaps = torch.tensor([each for row in log_ratios for each in row]).double()
    rollout = torch.full_like(gaps, mu)
    return BatchRecord(
        trajectory_ids=[f"train-1/{row}" for row in range(len(log_ratios))],
        num_tokens=[len(row) for row in log_ratios],
        rewards=torch.zeros(len(log_ratios)).double(),
        rollout_logprobs=rollout,
        learner_logprobs=rollout + gaps,
        size=BatchSize(trajectories=len(log_ratios), tokens=len(gaps), longest_response=8),
    )


def gradient(record, objective):
    """Gradient of a scalar of log pi with respect to log pi, [N]."""
    logprobs = record.learner_logprobs.double().clone().requires_grad_()
    (found,) = torch.autograd.grad(objective(logprobs), logprobs)
    return found


def test_p3o_is_the_gradient_of_its_capped_score_and_its_penalty():
    record = record_of([[0.0, 0.7], [-1.2, 0.1, 2.0]])
    advantages = torch.tensor([1.5, -0.5]).double()
    ratios = record.log_ratios.exp()
    ess = float(ratios.sum() ** 2 / (5 * (ratios**2).sum()))

    def objective(logprobs):
        log_ratios = logprobs - record.rollout_logprobs
        weights = log_ratios.exp().clamp(max=ess).detach()
        score = -(weights * logprobs * torch.tensor([1.5, 1.5, -0.5, -0.5, -0.5])).sum()
        divergence = (log_ratios + (-log_ratios).exp() - 1.0).sum()
        return (score + (1.0 - ess) * divergence) / 5

    found = losses.p3o(record, advantages, CONFIG)
    torch.testing.assert_close(found.values, gradient(record, objective))


def test_p3o_on_policy_is_a_plain_policy_gradient():
    found = losses.p3o(record_of([[0.0, 0.0], [0.0]]), torch.tensor([1.0, -2.0]).double(), CONFIG)
    assert found.values.tolist() == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("rollout", "learner", "advantage", "is_kept"),
    [
        (0.1, 0.35, 1.0, False),
        (0.4, 0.1, -1.0, False),
        (0.4, 0.1, 1.0, True),
        (0.1, 0.35, -1.0, True),
        (0.5, 0.65, 1.0, True),
    ],
)
def test_dppo_masks_a_token_that_moved_far_the_way_it_is_pushed(
    rollout, learner, advantage, is_kept
):
    record = record_of([[math.log(learner / rollout)]], mu=math.log(rollout))
    found = losses.dppo(record, torch.tensor([advantage]).double(), CONFIG)
    expected = -advantage * learner / rollout if is_kept else 0.0
    assert found.values.tolist() == pytest.approx([expected])
    assert found.masked_share == 1.0 - is_kept


def test_dppo_bounds_the_weight():
    record = record_of([[math.log(40.0)]], mu=math.log(0.001))
    found = losses.dppo(record, torch.tensor([1.0]).double(), CONFIG)
    assert found.values.tolist() == pytest.approx([-20.0])


def test_trm_masks_a_whole_response_for_its_worst_token_or_its_mean():
    # (log u)^2 / 2: .4^2 / 2 = .08 is beyond .05. u - 1 - log u of .1: .00517, beyond .002 in the
    # mean. Of .05 it is .00127.
    record = record_of([[0.0] * 50 + [0.4], [0.1, 0.1], [0.05, -0.05]])
    found = losses.trm(record, torch.tensor([1.0, 1.0, -2.0]).double(), CONFIG)
    assert found.values[:53].tolist() == [0.0] * 53
    expected = [2 * math.exp(0.05) / 55, 2 * math.exp(-0.05) / 55]
    assert found.values[53:].tolist() == pytest.approx(expected)
    assert found.masked_share == pytest.approx(53 / 55)


def test_m2po_clips_outward_tokens_beyond_the_bound_of_their_second_moment():
    # S is .05, .6, -.3, .1, -.05: squares .0025 .0025 .01 .09 .36, whose mean .093 is above .04.
    # Capped at .3 they sum to .195, below 5 x .04; at .6 to .465. So .3 is the bound.
    record = record_of([[0.05], [-0.02], [0.6], [-0.3], [0.1], [-0.05]])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0]).double()
    found = losses.m2po_clip(record, advantages, CONFIG)
    gaps = [0.05, -0.02, None, -0.3, 0.1, -0.05]
    expected = [
        0.0 if gap is None else -sign * math.exp(gap) / 6
        for gap, sign in zip(gaps, advantages.tolist(), strict=True)
    ]
    assert found.values.tolist() == pytest.approx(expected)
    assert found.masked_share == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("log_ratios", "is_kept"),
    [
        ([0.1, 0.3], [True, False]),  # mean .05; capped at .1 it is .01, so .1 is the bound
        ([0.5, 0.5], [False, False]),  # no bound is small enough
        ([-3.0, -0.5], [True, True]),  # none moves further
        ([0.1, 0.2], [True, True]),  # mean .025: no bound is needed
    ],
)
def test_m2pos_bound_is_the_largest_outward_ratio_whose_capped_moment_fits(log_ratios, is_kept):
    found = losses.m2po_clip(record_of([log_ratios]), torch.tensor([1.0]).double(), CONFIG)
    assert (found.values != 0.0).tolist() == is_kept


def test_sequence_tis_weighs_a_response_by_its_product_up_to_two():
    record = record_of([[0.1, 0.2], [1.0, -0.1, 0.3], [-0.4]])
    found = losses.grpo_sequence_tis(record, torch.tensor([1.0, -0.5, 2.0]).double(), CONFIG)
    expected = [-math.exp(0.3) / 6] * 2 + [0.5 * 2.0 / 9] * 3 + [-2.0 * math.exp(-0.4) / 3]
    assert found.values.tolist() == pytest.approx(expected)


def test_the_entropy_clip_bounds_a_token_by_its_share_of_the_mean_entropy():
    # The mean is 2, so the bounds are .1, .1, .3 and .3 nats the way that a token is pushed.
    record = replace(
        record_of([[0.15, -0.15, 0.25], [-0.35]]),
        entropies=torch.tensor([1.0, 1.0, 3.0, 3.0]),
    )
    found = losses.entropy_clip(record, torch.tensor([2.0, -1.0]).double(), CONFIG)
    expected = [0.0, -2 * math.exp(-0.15) / 4, -2 * math.exp(0.25) / 4, 0.0]
    assert found.values.tolist() == pytest.approx(expected)
