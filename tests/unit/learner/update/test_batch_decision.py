import math
from itertools import chain

import pytest
import torch

from tests.fixtures.fresh_tokens import weighed
from vcpo.algo.ess.calibration import MismatchCalibration, MismatchEstimate
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.ess.verdict import RefusalReason
from vcpo.api.algorithm import Algorithm
from vcpo_learner.estimator.loss import trajectory_advantages
from vcpo_learner.update.batch_decision import (
    batch_ess_unit,
    batch_moments,
    decide_step,
    may_have_advantage,
    on_policy_weight,
)
from vcpo_learner.update.result import BatchSummary

UNCALIBRATED = MismatchCalibration()


def summary_row(*, reward=0.0, weight=1.0, squared_norm=1.0, num_tokens=4):
    """Reward, log weight, squared norm and tokens of one trajectory."""
    return reward, math.log(weight) if weight > 0.0 else -math.inf, squared_norm, num_tokens


def summary_of(groups):
    rewards, log_weights, squared_norms, num_tokens = zip(*chain.from_iterable(groups), strict=True)
    return BatchSummary(
        group_sizes=[len(group) for group in groups],
        num_tokens=num_tokens,
        rewards=rewards,
        log_weights=log_weights,
        squared_norms=squared_norms,
    )


def decision_on(groups, *, calibration=UNCALIBRATED, kl_per_token=None, **algorithm):
    settings = Algorithm.model_validate({"method": "vcpo", **algorithm})
    batch = summary_of(groups)
    unit = batch_ess_unit(batch, settings, calibration)
    moments = batch_moments(batch, torch.empty(0), unit)
    error = calibration.relative_error
    return decide_step(
        unit, moments, settings.step_limits, relative_error=error, kl_per_token=kl_per_token
    )


def advantages_of(group, **algorithm):
    settings = Algorithm.model_validate(algorithm)
    batch = summary_of([group])
    columns = ([batch.rewards], [batch.squared_norms], [batch.log_weights])
    return trajectory_advantages(*columns, settings.loss_config)


def test_optimal_advantages_weigh_rewards_by_squared_norms():
    # b = (1*1 + 1*0 + 2*3) / 4 = 7/4.
    rows = zip([1.0, 0.0, 3.0], [1.0, 1.0, 2.0], strict=True)
    group = [summary_row(reward=reward, squared_norm=norm) for reward, norm in rows]
    assert advantages_of(group) == pytest.approx([-0.75, -1.75, 1.25])


def test_the_pessimistic_baseline_falls_with_what_the_weights_miss():
    # b* = (1*1 + 1*0) / 2; the mean weight is 3/4, and the least reward 0: b = 3/8.
    group = [summary_row(reward=1.0, weight=0.5), summary_row(reward=0.0, weight=1.0)]
    assert advantages_of(group, baseline="pessimistic") == pytest.approx([0.625, -0.375])


def calibrated(variance_per_token):
    """Fresh blocks of 40 tokens whose mean square is what this variance gives."""
    variance = 40 * variance_per_token
    nats = math.sqrt(variance + variance**2 / 4)
    return MismatchCalibration().observe(weighed([nats, -nats] * 64, [40] * 128))


def test_the_mismatch_of_the_engines_alone_takes_some_of_the_mean_weight():
    # Log weights of variance 2 over 400 tokens, truncated at 8; by integration over their density.
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    weights = torch.exp(math.sqrt(2.0) * z - 1.0).clamp(max=8.0)
    expected = float(torch.trapezoid(weights * density, z))
    found = on_policy_weight([400] * 8, Algorithm(), calibrated(0.005))
    assert found == pytest.approx(expected, rel=2e-3)
    given = Algorithm.model_validate({"onPolicyEssRatio": math.exp(-2.0)})
    assert on_policy_weight([400] * 8, given, UNCALIBRATED) == pytest.approx(expected, rel=1e-6)


def test_the_ess_sees_the_whole_batch_before_truncation():
    # Weights 1, 1/2, 2, 4: 7.5^2 / 21.25 / 4 = 0.6618.
    groups = [
        [summary_row(), summary_row(weight=0.5)],
        [summary_row(weight=2.0), summary_row(weight=4.0)],
    ]
    decision = decision_on(groups, settings={"weightCap": 1.0})
    assert decision.reading.ess_ratio == pytest.approx(56.25 / 21.25 / 4)


def test_the_scale_is_the_root_of_the_ratio_over_the_given_on_policy_ratio():
    groups = [[summary_row(), summary_row(weight=0.0)]]
    decision = decision_on(groups, onPolicyEssRatio=0.8)
    assert decision.verdict.scale == pytest.approx(math.sqrt(0.5 / 0.8))


def test_a_batch_that_lost_too_much_is_refused_and_not_damped():
    # Weights 1 and 0: ratio 1/2, below .6 of the on-policy .9.
    groups = [[summary_row(reward=1.0), summary_row(weight=0.0)]]
    verdict = decision_on(groups, onPolicyEssRatio=0.9, refuseBelow=0.6).verdict
    assert (verdict.scale, verdict.refusal) == (0.0, RefusalReason.LOW_ESS)


def test_equal_rewards_give_advantages_of_exactly_zero():
    group = [summary_row(reward=0.1, weight=0.3), summary_row(reward=0.1, weight=1.7)]
    assert advantages_of(group) == [0.0, 0.0]


def test_a_norm_that_is_not_a_number_refuses_the_step():
    group = [summary_row(reward=1.0), summary_row(squared_norm=math.nan)]
    with pytest.raises(NonFiniteWeightError, match=r"squared_norms\[1\] is nan"):
        advantages_of(group)


def calibrate(variance_per_token, count=4096):
    """Calibration that has found this mismatch in so many blocks."""
    return MismatchCalibration(
        estimate=MismatchEstimate(variance_per_token=variance_per_token, count=count)
    )


def test_the_calibration_gives_the_on_policy_ratio():
    # 0.004 nats^2 per token over 40 tokens: log w ~ N(-0.08, 0.16), ratio exp(-0.16) without end.
    group = [summary_row(num_tokens=40)] * 4000
    reading = decision_on([group], calibration=calibrate(0.004)).reading
    assert reading.on_policy_ess_ratio == pytest.approx(math.exp(-0.16), rel=1e-3)


@pytest.mark.parametrize(
    ("rewards", "algorithm", "expected"),
    [
        ([[1, 1], [0, 1]], {"baselineScope": "group"}, [False, False, True, True]),
        ([[1, 1], [0, 0]], {"baselineScope": "batch"}, [True] * 4),
        ([[1, 1], [1, 1]], {"baselineScope": "batch"}, [False] * 4),
        ([[1, 0], [1, 1]], {"baseline": "none"}, [True, False, True, True]),
    ],
    ids=["by group", "batch with two rewards", "batch with one reward", "no baseline"],
)
def test_a_trajectory_is_dynamic_sampling_when_its_advantage_may_differ_from_zero(
    rewards, algorithm, expected
):
    settings = Algorithm.model_validate(algorithm)
    assert may_have_advantage(rewards, settings.loss_config) == expected


@pytest.mark.parametrize("method", ["tba", "kimi", "reinforcePlusPlus", "vtrace"])
def test_equal_rewards_say_something_where_more_than_rewards_counts(method):
    settings = Algorithm.model_validate({"method": method})
    assert may_have_advantage([[1, 1]], settings.loss_config) == [True, True]


@pytest.mark.parametrize(
    ("method", "expected"), [("vcpo2", True), ("cispo", True), ("grpo", False), ("vtrace", False)]
)
def test_one_pass_is_enough_where_those_that_share_a_baseline_decide_for_themselves(
    method, expected
):
    settings = Algorithm.model_validate({"method": method})
    assert settings.fits_one_pass is expected
