"""A warning halves the learning rate until the run is well; a rollback halves it for good."""

import pytest

from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel
from vcpo.algo.health.rate_backoff import SMALLEST_BACKOFF, RateBackoff

WARNED, WELL = True, False


def factors(*steps):
    backoff, seen = RateBackoff(), []
    for is_warned in steps:
        backoff = backoff.observe(is_warned=is_warned, is_well=not is_warned)
        seen.append(backoff.factor)
    return seen


def test_the_first_warned_step_halves_the_rate():
    assert factors(WELL, WELL, WARNED) == [1.0, 1.0, 0.5]


def test_a_warning_that_lasts_halves_it_again_after_a_window_taken_at_the_lower_rate():
    # The step of the halving, then ten steps at the lower rate, and the next one is judged.
    assert factors(*[WARNED] * 23) == [0.5] * 11 + [0.25] * 11 + [0.125]


def test_the_rate_returns_after_ten_well_steps():
    assert factors(WARNED, *[WELL] * 11) == [0.5] * 10 + [1.0] * 2


def test_each_later_warning_doubles_the_wait():
    # Back after 10 well steps, then after 20, then after 40.
    steps = [WARNED, *[WELL] * 10, WARNED, *[WELL] * 20, WARNED, *[WELL] * 40]
    seen = factors(*steps)
    assert [index for index, factor in enumerate(seen) if factor == 1.0] == [10, 31, 72]


def test_a_step_that_is_neither_warned_nor_well_starts_the_wait_again():
    backoff = RateBackoff().observe(is_warned=True)
    for is_well in [True] * 9 + [False] + [True] * 9:
        backoff = backoff.observe(is_warned=False, is_well=is_well)
    assert backoff.factor == 0.5
    assert backoff.observe(is_warned=False, is_well=True).factor == 1.0


def test_a_false_alarm_costs_nine_steps():
    # Eight steps without a good trajectory, of a run that is well before and after them.
    warning, backoff, lost = EarlyWarning(), RateBackoff(), 0.0
    for relative in [0.9] * 20 + [0.02] * 8 + [0.9] * 100:
        lost += 1.0 - backoff.factor
        warning = warning.observe(StepHealth(relative_ess=relative))
        is_critical = warning.level is WarningLevel.CRITICAL
        is_well = warning.level is WarningLevel.OK
        backoff = backoff.observe(is_warned=is_critical, is_well=is_well)
    assert 0.0 < lost <= 9.0
    assert backoff.factor == 1.0


def test_a_second_warning_within_the_wait_halves_again():
    assert factors(WARNED, *[WARNED] * 10, WARNED)[-1] == 0.25


def test_the_rate_has_a_floor():
    assert factors(*[WARNED] * 500)[-1] == SMALLEST_BACKOFF == 1 / 64


def test_a_rollback_halves_the_rate_also_within_the_window_of_a_warning():
    backoff = RateBackoff().observe(is_warned=True).observe(is_warned=False)
    lowered = backoff.after_rollback()
    assert (lowered.factor, lowered.ceiling, lowered.age_steps) == (0.25, 0.25, 0)


def test_the_rate_does_not_rise_above_what_a_rollback_left():
    backoff = RateBackoff().after_rollback()
    for is_warned in [True, *[False] * 100]:
        backoff = backoff.observe(is_warned=is_warned, is_well=not is_warned)
    assert backoff.factor == backoff.ceiling == 0.5


def test_a_rollback_in_the_step_of_a_halving_does_not_halve_again():
    backoff = RateBackoff().observe(is_warned=True)
    after = backoff.after_rollback()
    assert (after.factor, after.ceiling, backoff.ceiling) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize("changes", [{"factor": 0.0}, {"ceiling": 0.5}], ids=str)
def test_a_factor_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=r"give numbers in \[0.015625, 1\]"):
        RateBackoff(**changes)
