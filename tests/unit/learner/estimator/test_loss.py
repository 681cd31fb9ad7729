import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.learner.estimator import losses
from tests.unit.learner.estimator.batches import coefficients, of_method, random_batch, record_of
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LOSS_CONFIGS, Clipping, KLPenalty, Method
from vcpo_learner.estimator.loss import regularized_rewards
from vcpo_learner.estimator.record import BatchSize

OF_ADVANTAGES = {
    "vcpo": losses.sequence_tis,
    "reinforce": losses.reinforce,
    "sequenceTis": losses.sequence_tis,
    "tokenTis": losses.token_tis,
    "rloo": losses.rloo,
    "grpo": losses.grpo,
    "drGrpo": losses.dr_grpo,
    "ppo": losses.ppo,
    "dapo": losses.dapo,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "icePop": losses.ice_pop,
    "sequenceMask": losses.sequence_mask,
    "geometricMask": losses.geometric_mask,
    "opsm": losses.opsm,
    "opmd": losses.opmd,
    "topr": losses.topr,
    "kimi": losses.kimi,
    "decoupledPpo": losses.decoupled_ppo,
}


def gradient(loss, record, advantages):
    """Of a literal loss with respect to the target policy's log-probabilities, [N]."""
    learner = record.learner_logprobs.clone().requires_grad_()
    rows = losses.pad(record, learner)
    spread = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(rows)
    loss(rows, losses.padded_batch(record), spread).backward()
    return learner.grad


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", OF_ADVANTAGES)
def test_coefficients_are_the_gradient_of_the_loss_in_the_paper(method, seed):
    record, advantages = random_batch(seed)
    expected = gradient(OF_ADVANTAGES[method], record, advantages)
    torch.testing.assert_close(of_method(method, record, advantages), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_a3po_is_the_gradient_of_its_loss_at_lag_three(seed):
    record, advantages = random_batch(seed)
    record = replace(record, lags=torch.full_like(record.lags, 3))
    expected = gradient(losses.a3po, record, advantages)
    torch.testing.assert_close(of_method("a3po", record, advantages), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("method", "loss"), [("tba", losses.tba), ("agro", losses.agro)])
def test_residual_methods_descend_the_variance_of_the_regularized_reward(method, loss):
    record, rewards = random_batch(3)
    learner = record.learner_logprobs.clone().requires_grad_()
    given = torch.tensor(rewards, dtype=torch.float64)
    loss(losses.pad(record, learner), losses.padded_batch(record), given).backward()
    shaped = regularized_rewards(given, record, LOSS_CONFIGS[Method(method)])
    found = of_method(method, record, (shaped - shaped.mean()).tolist())
    torch.testing.assert_close(found, learner.grad, rtol=1e-9, atol=1e-15)


def test_kimis_worked_example():
    # R = 1, 0, 0, log ratios .2, -.1, 0, tau .1: R - mean - tau * log ratio.
    record = record_of([[0.2], [-0.1], [0.0]])
    found = of_method("kimi", record, [2 / 3, -1 / 3, -1 / 3])
    expected = [-0.6466666666666667 / 3, 0.3233333333333333 / 3, 1 / 9]
    assert found.tolist() == pytest.approx(expected)


def test_decoupled_ppo_never_clips_at_the_start_of_a_step_and_coupled_does():
    # mu .2, learner .4: weight 2 in full; the coupled ratio of 2 has left the band.
    record = record_of([[math.log(2.0)]])
    assert of_method("decoupledPpo", record, [1.0]).item() == pytest.approx(-2.0)
    assert of_method("grpo", record, [1.0]).item() == 0.0


def test_a_dual_clip_stops_what_a_clip_lets_through():
    # u = 5, A = -1: PPO's loss is 5 and rises with u; held at 3 it has no gradient.
    record = record_of([[math.log(5.0)]])
    assert of_method("grpo", record, [-1.0]).item() == pytest.approx(5.0)
    assert of_method("ppo", record, [-1.0]).item() == 0.0


def test_token_weights_are_truncated_and_masked_as_worked_out():
    # rho = .3, .9, 1.6, 6: truncated at 2, and IcePop between .5 and 5.
    record = record_of([[math.log(rho) for rho in (0.3, 0.9, 1.6, 6.0)]])
    assert (-4 * of_method("tokenTis", record, [1.0])).tolist() == pytest.approx(
        [0.3, 0.9, 1.6, 2.0]
    )
    assert (-4 * of_method("icePop", record, [1.0])).tolist() == pytest.approx([0, 0.9, 1.6, 0])


def test_tapering_counts_negative_trajectories_by_their_ratio_up_to_one():
    record = record_of([[math.log(0.3)], [math.log(0.3)], [math.log(3.0)]])
    found = of_method("topr", record, [1.0, -1.0, -1.0]) * 3
    assert found.tolist() == pytest.approx([-1.0, 0.3, 1.0])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens():
    # Tokens 1, 1, 1, 5: mean 2, deviation sqrt(3); u = 1 and 4 tokens.
    found = of_method("reinforcePlusPlus", record_of([[0.0] * 3, [0.0]]), [1.0, 5.0])
    assert found[3].item() == pytest.approx(-3.0 / math.sqrt(3.0) / 4)


CORRECTED = [
    name
    for name, config in LOSS_CONFIGS.items()
    if config.kl_penalty is not KLPenalty.REFERENCE
    and not config.has_critic
    and not config.is_whitened
]


@pytest.mark.parametrize("method", CORRECTED)
def test_on_policy_every_method_is_reinforce_with_its_aggregation(method):
    record = record_of([[0.0] * 3, [0.0]], entropies=[[1.0] * 3, [1.0]])
    plain = replace(LOSS_CONFIGS[Method.REINFORCE], aggregation=LOSS_CONFIGS[method].aggregation)
    expected = coefficients(record, [1.0, -0.5], plain)
    found = of_method(method, record, [1.0, -0.5])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


WITHOUT_CRITIC = [name for name, config in LOSS_CONFIGS.items() if not config.has_critic]


@pytest.mark.parametrize("method", WITHOUT_CRITIC)
def test_the_order_of_trajectories_does_not_matter(method):
    record, advantages = random_batch(2)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    shuffled = replace(
        record.part(order),
        lags=record.select(record.lags, order),
        entropies=record.select(record.entropies, order),
        reference_logprobs=record.select(record.reference_logprobs, order),
    )
    found = of_method(method, shuffled, [advantages[at] for at in order])
    expected = record.select(of_method(method, record, advantages), order)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("method", [m for m in WITHOUT_CRITIC if m is not Method.KIMI])
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_extreme_ratios_overflow_nothing(method, log_ratio):
    record = record_of(
        [[log_ratio, 0.0], [0.1]],
        entropies=[[1.0] * 2, [1.0]],
        reference_logprobs=[[-1.0] * 2, [-1]],
    )
    assert of_method(method, record, [1.0, -1.0]).isfinite().all()


def test_a_token_that_the_learner_rules_out_has_no_gradient_where_weights_correct():
    record = record_of([[-math.inf, 0.0], [0.0]])
    assert of_method("vcpo", record, [1.0, -1.0])[:2].tolist() == [0.0, 0.0]


def test_a_coefficient_that_is_no_number_is_reported_with_its_trajectory():
    record = record_of([[0.0], [-math.inf]])
    with pytest.raises(NonFiniteWeightError, match=r"coefficients\[1\]"):
        of_method("kimi", record, [1.0, -1.0])


def test_a_batch_that_is_masked_throughout_has_no_gradient():
    record = record_of([[0.5], [0.5]])
    assert not of_method("geometricMask", record, [1.0, -1.0]).any()


@given(st.floats(-3.0, 3.0), st.sampled_from([-1.0, 1.0]))
def test_a_clip_never_adds_to_what_it_gates(log_ratio, advantage):
    record = record_of([[log_ratio]])
    free = replace(LOSS_CONFIGS[Method.GRPO], clipping=Clipping.OPEN)
    gated = abs(of_method("grpo", record, [advantage]).item())
    assert gated <= abs(coefficients(record, [advantage], free).item())


def test_constant_aggregation_divides_by_the_longest_response():
    # 100 and 300 tokens of loss 1 with 3000 at most: 400 / (2 * 3000).
    record = record_of([[0.0] * 100, [0.0] * 300], longest=3000)
    assert record.size == BatchSize(trajectories=2, tokens=400, longest_response=3000)
    assert -of_method("drGrpo", record, [1.0, 1.0]).sum().item() == pytest.approx(400 / 6000)
