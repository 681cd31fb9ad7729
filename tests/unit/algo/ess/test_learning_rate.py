import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.learning_rate import LearningRateRule, learning_rate_scale

ratios = st.floats(1e-6, 1.0)
rules = st.sampled_from(LearningRateRule)


@pytest.mark.parametrize(
    ("rule", "expected"), [("sqrt", 0.813489), ("linear", 0.661765), ("none", 1.0)]
)
def test_each_rule_follows_its_power_of_the_ratio(rule: str, expected: float) -> None:
    # 56.25 / 85 = 0.661765; 0.813489^2 = 0.661764
    scale = learning_rate_scale(56.25 / 85.0, 1.0, LearningRateRule(rule))
    assert scale == pytest.approx(expected, abs=1e-6)


def test_the_ratio_is_measured_against_the_on_policy_one() -> None:
    assert learning_rate_scale(0.2, 0.8) == pytest.approx(0.5, rel=1e-15)


@given(ratios, rules)
def test_a_batch_as_effective_as_on_policy_keeps_the_full_rate(
    ratio: float, rule: LearningRateRule
) -> None:
    assert learning_rate_scale(ratio, ratio, rule) == 1.0


def test_a_batch_more_effective_than_expected_is_not_sped_up() -> None:
    assert learning_rate_scale(0.9, 0.5) == 1.0


@given(ratios, ratios, rules)
def test_the_scale_is_positive_and_at_most_one(
    ratio: float, on_policy: float, rule: LearningRateRule
) -> None:
    assert 0.0 < learning_rate_scale(ratio, on_policy, rule) <= 1.0


@given(ratios, ratios, ratios, rules)
def test_the_scale_never_falls_when_the_ratio_rises(
    one: float, other: float, on_policy: float, rule: LearningRateRule
) -> None:
    low, high = sorted([one, other])
    assert learning_rate_scale(low, on_policy, rule) <= learning_rate_scale(high, on_policy, rule)


@given(ratios, ratios)
def test_sqrt_damps_less_than_linear(ratio: float, on_policy: float) -> None:
    linear = learning_rate_scale(ratio, on_policy, LearningRateRule.LINEAR)
    assert learning_rate_scale(ratio, on_policy, LearningRateRule.SQRT) >= linear


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.0001, math.nan, math.inf], ids=str)
def test_a_ratio_out_of_range_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=f"^ess_ratio is {bad}"):
        learning_rate_scale(bad, 1.0)
    with pytest.raises(ValueError, match=f"^on_policy_ess_ratio is {bad}"):
        learning_rate_scale(1.0, bad)
