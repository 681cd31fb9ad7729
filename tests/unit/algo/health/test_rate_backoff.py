"""A warning halves the learning rate, once for each window of the warning; so does a rollback."""

import json

import pytest

from vcpo.algo import RateBackoff
from vcpo.algo.health.rate_backoff import SMALLEST_BACKOFF

WARNED, WELL = True, False


def factors(*steps):
    backoff, seen = RateBackoff(), []
    for is_warned in steps:
        backoff = backoff.observe(is_warned=is_warned)
        seen.append(backoff.factor)
    return seen


def test_the_first_warned_step_halves_the_rate():
    assert factors(WELL, WELL, WARNED) == [1.0, 1.0, 0.5]


def test_a_warning_that_lasts_halves_it_again_after_a_window_taken_at_the_lower_rate():
    # The step of the halving, then ten steps at the lower rate, and the next one is judged.
    assert factors(*[WARNED] * 23) == [0.5] * 11 + [0.25] * 11 + [0.125]


def test_the_rate_does_not_rise_again():
    assert factors(WARNED, *[WELL] * 500)[-1] == 0.5


def test_a_second_warning_soon_after_the_window_halves_at_once():
    assert factors(WARNED, *[WELL] * 10, WARNED)[-1] == 0.25


def test_the_rate_has_a_floor():
    assert factors(*[WARNED] * 500)[-1] == SMALLEST_BACKOFF == 1 / 64


def test_a_rollback_halves_the_rate_also_within_the_window_of_a_warning():
    backoff = RateBackoff().observe(is_warned=True).observe(is_warned=False)
    assert backoff.after_rollback() == RateBackoff(factor=0.25, age_steps=0)


def test_a_rollback_in_the_step_of_a_halving_does_not_halve_again():
    backoff = RateBackoff().observe(is_warned=True)
    assert backoff.after_rollback() == backoff == RateBackoff(factor=0.5, age_steps=0)


def test_a_restored_backoff_goes_on_with_the_same_window():
    backoff = RateBackoff().observe(is_warned=True).observe(is_warned=True)
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
