"""Each sign of a collapse alone, at and beyond its threshold; windows are of ten steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo import StepHealth, WarningThresholds
from vcpo.algo.health.warning_signals import signal_severities

WARN, CRITICAL = pytest.approx(1 / 3), pytest.approx(2 / 3)
THRESHOLDS = WarningThresholds()


def steps(*relative, **numbers):
    return [StepHealth(relative_ess=each, **numbers) for each in relative]


def severity(signal, window, thresholds=THRESHOLDS, forgotten=100):
    return signal_severities(window, thresholds, forgotten)[signal]


def test_a_bad_step_counts_half_among_the_first_ten_of_a_run():
    early = steps(*[0.9] * 6, *[0.1] * 4, kl_per_token=0.1)
    assert severity("bad_steps", early, forgotten=0) == CRITICAL
    assert severity("bad_steps", early[:-1], forgotten=0) == 0.0
    # Seven of the window's steps are early: one bad one among them, and two later ones at half.
    mixed = steps(0.1, *[0.9] * 7, 0.1, 0.1, kl_per_token=0.1)
    assert severity("bad_steps", mixed[:-1], forgotten=3) == 0.0
    assert severity("bad_steps", mixed, forgotten=3) == CRITICAL


def test_three_dips_among_good_steps_warn():
    assert severity("dips", steps(*[0.9] * 7, 0.2, 0.1, 0.05)) == WARN


def test_two_dips_do_not():
    assert severity("dips", steps(*[0.9] * 8, 0.01, 0.01)) < 0.05


def test_dips_speak_from_the_third_step_on():
    assert severity("dips", steps(0.02, 0.02)) == 0.0
    assert severity("dips", steps(0.02, 0.02, 0.02)) == pytest.approx(0.6)


def test_a_severity_is_linear_in_the_logarithm():
    # Half way between 1 and 0.2 on a log scale is the root of 0.2.
    middle = math.sqrt(0.2)
    assert severity("dips", steps(*[0.9] * 7, *[middle] * 3)) == pytest.approx(1 / 6)


def test_a_low_median_warns_in_a_full_window():
    low = steps(*[0.9] * 4, *[0.3] * 6)
    assert severity("lasting_loss", low) == WARN
    assert severity("lasting_loss", low[1:]) == 0.0


def test_two_steps_far_away_and_with_little_left_are_critical():
    good = steps(*[0.9] * 8, kl_per_token=0.1)
    bad = steps(0.1, 0.05, kl_per_token=0.1)
    assert severity("bad_steps", good + bad) == CRITICAL
    assert severity("bad_steps", good + bad[:1]) == 0.0


def test_little_left_without_divergence_is_not_bad():
    assert severity("bad_steps", steps(*[0.05] * 10, kl_per_token=0.099)) == 0.0


def test_divergence_with_enough_left_is_not_bad():
    assert severity("bad_steps", steps(*[0.11] * 10, kl_per_token=2.0)) == 0.0


def test_a_divergence_that_is_not_known_counts_as_high():
    assert severity("bad_steps", steps(0.9, 0.1, 0.1)) == CRITICAL


def test_a_window_without_a_good_step_is_critical():
    assert severity("unbroken_loss", steps(*[0.05] * 9, 0.1)) == CRITICAL
    assert severity("unbroken_loss", steps(*[0.05] * 9, 0.11)) == 0.0


@pytest.mark.parametrize(("latest", "expected"), [(0.02, CRITICAL), (0.019, 0.0)], ids=str)
def test_tenfold_divergence_during_dips_breaks_out(latest, expected):
    before = steps(*[0.5] * 20, kl_per_token=0.002)
    after = steps(*[0.15] * 3, kl_per_token=latest)
    assert severity("breakout", before + after) == expected


def test_tenfold_divergence_without_dips_does_not():
    before = steps(*[0.5] * 20, kl_per_token=0.002)
    assert severity("breakout", before + steps(*[0.5] * 3, kl_per_token=0.2)) == 0.0


def test_one_freak_is_no_breakout():
    before = steps(*[0.15] * 20, kl_per_token=0.002)
    after = steps(0.1, kl_per_token=40.0) + steps(0.15, kl_per_token=0.002)
    assert severity("breakout", before + after) == 0.0


def test_ten_times_a_rounding_error_is_no_breakout():
    before = steps(*[0.15] * 20, kl_per_token=1e-9)
    assert severity("breakout", before + steps(*[0.15] * 3, kl_per_token=9e-4)) == 0.0


@pytest.mark.parametrize(
    "numbers", [{"gradient_norm": 1e-6}, {"ess": 1.4}], ids=lambda each: next(iter(each))
)
def test_most_steps_without_gradient_or_sample_are_death(numbers):
    alive = steps(*[0.9] * 4, gradient_norm=1.0, ess=60.0)
    dead = steps(*[0.9] * 6, **({"gradient_norm": 1.0, "ess": 60.0} | numbers))
    assert severity("death", alive + dead) == 1.0
    assert severity("death", alive + alive + dead[:4]) == 0.0


def test_what_is_not_known_is_no_death():
    assert severity("death", steps(*[0.9] * 10)) == 0.0


def test_steps_without_a_weight_are_as_bad_as_it_gets_alive():
    found = signal_severities(steps(*[0.0] * 10), THRESHOLDS)
    assert max(found.values()) == 0.95


@given(st.lists(st.floats(0.0, 2.0), max_size=30), st.floats(0.0, 5.0))
def test_every_severity_lies_between_well_and_dead(relative, divergence):
    found = signal_severities(steps(*relative, kl_per_token=divergence), THRESHOLDS)
    assert all(0.0 <= each <= 1.0 for each in found.values())


@given(st.lists(st.floats(0.01, 1.0), min_size=10, max_size=10), st.floats(0.1, 1.0))
def test_losing_more_is_never_better(relative, factor):
    worse = signal_severities(
        steps(*[each * factor for each in relative], kl_per_token=1.0), THRESHOLDS
    )
    better = signal_severities(steps(*relative, kl_per_token=1.0), THRESHOLDS)
    assert all(worse[name] >= better[name] - 1e-12 for name in better)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_steps", 2),
        ("window_steps", 51),
        ("lasting_relative_ess", 1.0),
        ("dip_relative_ess", 0.0),
        ("bad_relative_ess", math.nan),
        ("dip_steps", 0),
        ("bad_steps", 11),
        ("kl_breakout", 1.0),
        ("kl_floor", 0.0),
    ],
)
def test_a_threshold_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        WarningThresholds(**{name: value})


@pytest.mark.parametrize("name", ["relative_ess", "ess", "kl_per_token", "gradient_norm"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf], ids=str)
def test_a_step_with_an_impossible_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        StepHealth(**({"relative_ess": 1.0} | {name: value}))
