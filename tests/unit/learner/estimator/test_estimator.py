import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.models import llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import gradient_of_step, make_spec, with_micro_batches
from tests.unit.learner.estimator import losses
from tests.unit.learner.estimator.batches import (
    coefficients,
    of_method,
    random_batch,
    record_of,
    rows_of,
)
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LOSS_CONFIGS, Clipping, KLPenalty, LossConfig, Method
from vcpo.service.lifecycle import StartError
from vcpo_learner.estimator.clipping import (
    Band,
    active_within,
    balanced_band,
    clip_factors,
    second_moment_mask,
)
from vcpo_learner.estimator.loss import regularized_rewards, shaped_rewards, token_coefficients
from vcpo_learner.estimator.record import BatchSize
from vcpo_learner.estimator.trial import require_own_functions


@pytest.mark.parametrize("config", LOSS_CONFIGS.values(), ids=map(str, LOSS_CONFIGS))
def test_every_loss_computes_on_the_device_of_the_record(config):
    record, advantages = random_batch()
    if config.has_critic:
        record = replace(record, advantages=record.spread(record.rewards.new_tensor(advantages)))
    with torch.device("meta"):
        regularized_rewards(shaped_rewards(record, config), record, config)
        found = token_coefficients(record, advantages, config)
    assert found.values.device == record.learner_logprobs.device


REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(16000, 0.0), (16384, 0.0), (18432, 0.5), (20480, 1.0)]
)
def test_the_penalty_of_long_responses_rises_over_the_last_part(num_tokens, expected):
    # 4096 of 20480 tokens, as DAPO has it.
    record = record_of([[0.0] * num_tokens, [0.0]], longest=20480)
    shaped = shaped_rewards(record, LOSS_CONFIGS[Method.DAPO])
    assert shaped.tolist() == pytest.approx([-expected, 0.0])


def test_without_a_part_no_response_is_too_long():
    record = record_of([[0.0] * 10], longest=10)
    assert shaped_rewards(record, LOSS_CONFIGS[Method.GRPO]).tolist() == [0.0]


def test_tbas_worked_example():
    # R = 1, 0; log pi = -10, -12; log ref = -10.5, -11; beta .5: KL terms of -.25 and .25 times
    # beta around their mean.
    record = record_of([[0.0], [-2.0]], mu=-10.0, reference_logprobs=[[-10.5], [-11.0]])
    config = LOSS_CONFIGS[Method.TBA]
    shaped = regularized_rewards(REWARDS, record, _with_beta(config, 0.5))
    assert shaped.tolist() == pytest.approx([0.75, 0.5])
    assert ((shaped.mean() - shaped) / 0.5).tolist() == pytest.approx([-0.25, 0.25])


def test_agros_worked_example():
    # R = 1, 0, log ratios .5, -1, beta .5: .75 and .5, half the variance .0078.
    record = record_of([[0.5], [-1.0]], mu=0.0, reference_logprobs=[[0.0], [0.0]])
    shaped = regularized_rewards(REWARDS, record, _with_beta(LOSS_CONFIGS[Method.AGRO], 0.5))
    assert shaped.tolist() == pytest.approx([0.75, 0.5])
    assert 0.5 * shaped.var(correction=0).item() == pytest.approx(0.0078125)


def _with_beta(config, beta):
    return replace(config, kl_coefficient=beta)


LOG_RATIOS = torch.tensor([0.05, -0.02, 0.6, -0.3, 0.1, -0.05], dtype=torch.float64)
PUSHED_OUT = LOG_RATIOS[[0, 2, 3, 4, 5]]
RATIOS = torch.tensor([1.5, 0.9, 0.5, 1.3], dtype=torch.float64)
SIGNS = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

any_log_ratios = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=20).map(
    lambda row: torch.tensor(row, dtype=torch.float64)
)


def test_the_second_moment_of_tokens_pushed_out_drops_the_same():
    # Mean square .093 with .6, .0263 without.
    kept = second_moment_mask(PUSHED_OUT, 0.04)
    assert kept.tolist() == [True, False, True, True, True]


def test_no_token_is_no_decision():
    assert second_moment_mask(torch.zeros(0), 0.04).tolist() == []


@given(any_log_ratios, st.floats(0.001, 2.0))
def test_what_is_kept_is_within_the_bound_and_one_more_would_not_be(log_ratios, bound):
    kept = second_moment_mask(log_ratios, bound)
    squares = log_ratios.square()
    if kept.any():
        assert float(squares[kept].mean()) <= bound * (1 + 1e-12)
    if not kept.all():
        larger = torch.cat([squares[kept], squares[~kept].min()[None]])
        assert float(larger.mean()) > bound * (1 - 1e-12)


def test_only_tokens_with_a_gradient_count_for_the_balance():
    # At (.6, 1.2): 1.5 up and .5 down are clipped, .9 / (.9 + 1.3) = .409. At (.6, 1.5):
    # (1.5 + .9) / 3.7 = .649. The upper end moves in steps of .05.
    assert balanced_band(RATIOS, SIGNS, 0.4) == Band(low=0.6, high=1.2)
    assert balanced_band(RATIOS, SIGNS, 0.6).high == pytest.approx(1.5)


def test_a_balance_out_of_reach_ends_at_the_widest_band():
    negative = -torch.ones(4, dtype=torch.float64)
    band = balanced_band(RATIOS, negative, 0.4)
    assert (band.low, band.high) == (0.9, 3.0)


def test_a_token_is_inactive_only_beyond_the_band_in_its_own_direction():
    band = Band(low=0.8, high=1.2)
    assert active_within(RATIOS, SIGNS, band).tolist() == [False, True, False, True]


def factors(method, record, advantages):
    per_token = record.spread(torch.tensor(advantages, dtype=torch.float64))
    return clip_factors(record, per_token, LOSS_CONFIGS[Method(method)])


def test_opsm_drops_negative_sequences_that_the_learner_left_behind():
    # Mean log mu/pi of .15 is above .1 with A < 0; with A > 0 nothing is dropped.
    record = record_of([[-0.15, -0.15], [-0.15, -0.15], [-0.05, -0.05]])
    found = factors("opsm", record, [-1.0, 1.0, -1.0])
    assert rows_of(record, found) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_proximal_clip_is_off_at_lag_zero_and_widens_with_the_lag():
    # log u = .3: at lag 1 the ratio is u = 1.35, at lag 3 its cube root 1.105.
    far = record_of([[0.3]], lag=1)
    assert factors("a3po", far, [1.0]).item() == 0.0
    for lag in (0, 3):
        record = replace(far, lags=torch.full_like(far.lags, lag))
        assert factors("a3po", record, [1.0]).item() == 1.0


def test_bapo_widens_the_band_for_positive_tokens():
    # Ratio 1.3 up, alone with a negative of 1: clipped at 1.2, back in at 1.3 for a share above 0.
    record = record_of([[math.log(1.29)], [0.0]])
    assert factors("bapo", record, [1.0, -1.0])[0].item() == 1.0
    assert factors("grpo", record, [1.0, -1.0])[0].item() == 0.0


def test_stapo_silences_improbable_tokens_that_the_policy_was_sure_about():
    # Four tokens with A > 0 and pi < .002; entropies .1, .4, .9, 2: the 75 % quantile is 1.175.
    record = record_of([[0.0]] * 4, mu=math.log(1e-3), entropies=[[0.1], [0.4], [0.9], [2.0]])
    assert (factors("stapo", record, [1.0] * 4) > 0).tolist() == [False] * 3 + [True]


def test_stapos_share_of_surviving_tokens_is_exact_in_float64():
    # Of two suspects, entropies .1 and .9, the first is below their 75 % quantile of .7: three of
    # four tokens survive, so each counts 4/3.
    record = record_of([[0.0]] * 4, mu=math.log(1e-3), entropies=[[0.1], [0.9], [0.5], [0.5]])
    found = factors("stapo", record, [1.0, 1.0, -1.0, -1.0])
    assert found.tolist() == [0.0, 4 / 3, 4 / 3, 4 / 3]


def test_stapo_leaves_improbable_tokens_of_bad_responses_alone():
    record = record_of([[0.0]] * 2, mu=math.log(1e-3), entropies=[[0.1], [2.0]])
    assert factors("stapo", record, [-1.0, -1.0]).tolist() == [1.0, 1.0]


OWN = "tests.fixtures.learner.own_losses"


def spec_with(**algorithm):
    return make_spec(**{"method": "grpo", "baseline": "grpo", **algorithm})


def refusal(**algorithm):
    with pytest.raises(StartError) as refused:
        require_own_functions(spec_with(**algorithm))
    return str(refused.value)


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
def test_a_loss_written_as_grpo_has_the_gradient_of_grpo(micro_batch):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    own, shipped = (
        gradient_of_step(
            seeded_model(llama, dtype=torch.float64),
            with_micro_batches(spec_with(**algorithm), micro_batch),
            groups,
        )
        for algorithm in ({"loss": f"{OWN}:written_grpo"}, {})
    )
    assert shipped.any()
    torch.testing.assert_close(own, shipped, rtol=1e-9, atol=1e-9 * float(shipped.norm()))


@pytest.mark.parametrize(
    ("own", "shipped"), [("written_mean", "groupMean"), ("written_opob", "opob")]
)
def test_a_baseline_written_as_a_shipped_one_has_its_gradient(own, shipped):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    found, expected = (
        gradient_of_step(
            seeded_model(llama, dtype=torch.float64), make_spec(baseline=baseline), groups
        )
        for baseline in (f"{OWN}:{own}", shipped)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("a_tensor", "returned Tensor; it must return TokenCoefficients(values=...)"),
        ("one_number_each", "returned values of (5,); they must be a tensor of (15,), one for"),
        ("two_arguments", "must take (record, advantages, config), but too many positional"),
        ("no_number", "returned coefficients of trajectory 0 that add up to nan"),
        ("breaks", "raised KeyError: 'kl' (own_losses.py:48)"),
        ("at_random", "returned other numbers the second time"),
        ("absent", "cannot be imported (AttributeError: "),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_with_what_is_wrong(function, message):
    path = f"{OWN}:{function}"
    assert refusal(loss=path).startswith(f"spec.algorithm.loss: {path!r} {message}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "returned 2 numbers for 3 trajectories; it must return one for each"),
        ("infinite", "returned inf for trajectory 0; advantages must be finite"),
        (
            "of_the_prompt",
            "cannot be called: its parameter `prompt` is none of rewards, num_tokens",
        ),
        ("nothing", "returned None; it must return the advantage of each trajectory"),
        ("math", "is not a function"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_refused_with_what_is_wrong(function, message):
    path = f"{OWN}:{function}"
    assert refusal(baseline=path).startswith(f"spec.algorithm.baseline: {path!r} {message}")


def test_a_module_that_is_not_there_is_refused_with_the_cure():
    said = refusal(loss="no_such_package.losses:mine")
    assert said.startswith("spec.algorithm.loss: 'no_such_package.losses:mine' cannot be imported")
    assert "put its module beside the run's file, or install it" in said


def test_a_coefficient_that_is_no_number_skips_the_step():
    record, advantages = random_batch(0)
    with pytest.raises(NonFiniteWeightError, match=r"coefficients\[0\]"):
        token_coefficients(record, advantages, LossConfig(loss=f"{OWN}:no_number"))


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
