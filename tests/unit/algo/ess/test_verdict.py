import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.verdict import RefusalReason, StepLimits, judge_step

RATIOS = st.floats(0.001, 1.0)


def test_without_limits_the_scale_is_that_of_the_published_rule():
    verdict = judge_step(0.2, 0.8, StepLimits())
    assert (verdict.scale, verdict.refusal) == (0.5, None)


def test_below_the_dead_band_the_scale_leaves_1_without_a_jump():
    # 0.4 is the band's end; a quarter of it has a scale of 1/2.
    assert judge_step(0.1, 0.8, StepLimits(dead_band=0.5)).scale == pytest.approx(0.5)
    assert judge_step(0.4 - 1e-9, 0.8, StepLimits(dead_band=0.5)).scale == pytest.approx(1.0)


def test_what_chance_does_not_explain_is_damped_as_published():
    # 0.2 of 0.8 is 1.39 nats below, more than twice the reach of chance.
    assert judge_step(0.2, 0.8, StepLimits(), chance_nats=0.69).scale == pytest.approx(0.5)


def test_between_the_two_the_scale_falls_at_twice_the_pace():
    # 1.5 times the reach of 0.4 nats: as if 0.4 nats were gone.
    ratio = 0.8 * math.exp(-0.6)
    scale = judge_step(ratio, 0.8, StepLimits(), chance_nats=0.4).scale
    assert scale == pytest.approx(math.exp(-0.2), rel=1e-12)


@given(RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_ends_without_a_jump_on_either_side(expected, chance):
    for edge in (chance, 2 * chance):
        inside, outside = (
            judge_step(
                expected * math.exp(-edge * (1 + sign * 1e-9)),
                expected,
                StepLimits(),
                chance_nats=chance,
            ).scale
            for sign in (-1, 1)
        )
        assert inside == pytest.approx(outside, rel=1e-6)


@given(RATIOS, RATIOS, RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_never_damps_more_of_a_batch_more(one, other, expected, chance):
    low, high = (
        judge_step(ratio, expected, StepLimits(), chance_nats=chance).scale
        for ratio in sorted((one, other))
    )
    assert low <= high * (1 + 1e-9)


@given(RATIOS, RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_never_damps_more_than_the_published_rule(ratio, expected, chance):
    published = judge_step(ratio, expected, StepLimits(dead_band=0.0)).scale
    lenient = judge_step(ratio, expected, StepLimits(), chance_nats=chance).scale
    assert lenient >= published * (1 - 1e-9)


@pytest.mark.parametrize("chance", [800.0, 1e300])
def test_a_chance_that_reaches_beyond_any_float_explains_everything(chance):
    assert judge_step(1e-300, 1.0, StepLimits(), chance_nats=chance).scale == 1.0


def test_a_band_that_is_given_takes_the_place_of_chance():
    assert judge_step(0.2, 0.8, StepLimits(dead_band=0.0), chance_nats=5.0).scale == 0.5


def test_above_its_target_a_batch_is_not_damped_and_below_it_from_there():
    limits = StepLimits(target_ess_ratio=0.5)
    assert judge_step(0.4, 0.8, limits).scale == 1.0
    assert judge_step(0.1, 0.8, limits).scale == pytest.approx(0.5)  # a quarter of 0.4


def test_chance_counts_from_the_target():
    limits = StepLimits(target_ess_ratio=0.5)
    ratio = 0.4 * math.exp(-0.3)
    assert judge_step(ratio, 0.8, limits, chance_nats=0.31).scale == 1.0
    assert judge_step(ratio, 0.8, limits, chance_nats=0.1).scale == pytest.approx(math.exp(-0.15))


def test_too_little_of_a_batch_is_refused():
    limits = StepLimits(refuse_below=0.1)
    assert judge_step(0.079, 0.8, limits).refusal is RefusalReason.LOW_ESS
    assert judge_step(0.081, 0.8, limits).refusal is None


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["ess_ratio", "kl_per_token", "gradient_norm"])
def test_what_is_no_number_refuses_the_step(name, value):
    numbers = {"ess_ratio": 0.5, name: value}
    verdict = judge_step(on_policy_ess_ratio=1.0, limits=StepLimits(), **numbers)
    assert (verdict.scale, verdict.refusal) == (0.0, RefusalReason.NON_FINITE)


@given(RATIOS, RATIOS, st.floats(0.0, 0.9), st.floats(0.0, 0.9))
def test_a_refused_step_has_no_scale_and_a_taken_one_has(ratio, expected, band, below):
    verdict = judge_step(ratio, expected, StepLimits(dead_band=band, refuse_below=below))
    assert (verdict.refusal is None) == (0.0 < verdict.scale <= 1.0)


@pytest.mark.parametrize("name", ["dead_band", "refuse_below"])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan], ids=str)
def test_a_limit_that_is_no_part_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        StepLimits(**{name: value})
