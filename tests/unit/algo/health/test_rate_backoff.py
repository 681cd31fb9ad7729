"""A critical warning halves the learning rate, once for each window of the warning."""

import json

import pytest

from vcpo.algo import RateBackoff, WarningLevel
from vcpo.algo.health.rate_backoff import SMALLEST_BACKOFF

CRITICAL, WARN, OK = WarningLevel.CRITICAL, WarningLevel.WARN, WarningLevel.OK


def factors(*levels):
    backoff, seen = RateBackoff(), []
    for level in levels:
        backoff = backoff.observe(level)
        seen.append(backoff.factor)
    return seen


def test_the_first_critical_step_halves_the_rate():
    assert factors(OK, WARN, CRITICAL) == [1.0, 1.0, 0.5]


def test_a_dead_run_is_at_least_critical():
    assert factors(WarningLevel.DEAD) == [0.5]


def test_a_warning_that_lasts_halves_it_again_after_a_window_taken_at_the_lower_rate():
    # The step of the halving, then ten steps at the lower rate, and the next one is judged.
    assert factors(*[CRITICAL] * 23) == [0.5] * 11 + [0.25] * 11 + [0.125]


def test_the_rate_does_not_rise_again():
    assert factors(CRITICAL, *[OK] * 500)[-1] == 0.5


def test_a_second_warning_soon_after_the_window_halves_at_once():
    assert factors(CRITICAL, *[OK] * 10, CRITICAL)[-1] == 0.25


def test_the_rate_has_a_floor():
    assert factors(*[CRITICAL] * 500)[-1] == SMALLEST_BACKOFF == 1 / 64


def test_a_restored_backoff_goes_on_with_the_same_window():
    backoff = RateBackoff().observe(CRITICAL).observe(CRITICAL)
    restored = RateBackoff.from_dict(json.loads(json.dumps(backoff.to_dict())))
    assert restored == backoff == RateBackoff(factor=0.5, age_steps=1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param({"factor": 0.5}, "state is .* give what to_dict", id="a part is missing"),
        pytest.param({"factor": "x", "age_steps": 1}, "state is", id="not a number"),
        pytest.param({"factor": 0.0, "age_steps": 1}, r"factor is 0.0: give .* \[0.015625, 1\]"),
        pytest.param({"factor": 2.0, "age_steps": None}, r"factor is 2.0"),
    ],
)
def test_a_state_of_another_form_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        RateBackoff.from_dict(state)
