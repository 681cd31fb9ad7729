from itertools import pairwise

import pytest

from vcpo.algo.health.early_warning import (
    CRITICAL_SCORE,
    DEAD_STEPS,
    WARN_SCORE,
    EarlyWarning,
    StepHealth,
    WarningLevel,
)


def warning_after(*relative, warning=None, **numbers):
    warning = warning or EarlyWarning()
    for each in relative:
        warning = warning.observe(StepHealth(relative_ess=each, **numbers))
    return warning


def levels_of(*relative):
    warning, levels = EarlyWarning(), []
    for each in relative:
        warning = warning_after(each, warning=warning)
        levels.append(warning.level)
    return levels


def test_the_mean_weighs_a_step_with_four_fifths_of_the_one_after_it():
    # (0.64 * 0.1 + 0.8 * 0.2 + 0.4) / (0.64 + 0.8 + 1)
    assert warning_after(0.1, 0.2, 0.4).mean == pytest.approx(0.624 / 2.44)


@pytest.mark.parametrize(
    ("relative", "level"),
    [(0.34, WarningLevel.OK), (0.32, WarningLevel.WARN), (0.21, WarningLevel.CRITICAL)],
)
def test_the_level_is_that_of_the_mean(relative, level):
    assert warning_after(*[relative] * 30).level is level


def test_a_step_above_the_on_policy_ess_counts_as_on_policy():
    assert warning_after(5.0, 5.0).mean == pytest.approx(1.0)


def test_nothing_seen_is_nothing_wrong():
    assert (EarlyWarning().level, EarlyWarning().score) == (WarningLevel.OK, 0.0)


def test_the_first_four_steps_have_no_level():
    assert levels_of(*[0.01] * 5) == [WarningLevel.OK] * 4 + [WarningLevel.CRITICAL]


def test_one_low_step_is_no_warning():
    assert set(levels_of(*[0.9] * 20, 0.01, *[0.9] * 20)) == {WarningLevel.OK}


def test_a_level_ends_at_one_and_a_half_of_its_threshold():
    critical = warning_after(*[0.2] * 60)
    still, warned = (warning_after(*[at] * 60, warning=critical) for at in (0.32, 0.34))
    assert (still.level, warned.level) == (WarningLevel.CRITICAL, WarningLevel.WARN)
    still, well = (warning_after(*[at] * 60, warning=warned) for at in (0.48, 0.51))
    assert (still.level, well.level) == (WarningLevel.WARN, WarningLevel.OK)


def test_a_run_at_a_threshold_does_not_come_and_go():
    levels = levels_of(*[0.9] * 5, *[0.25, 0.4] * 60)
    assert sum(a is not b for a, b in pairwise(levels)) == 1


def test_the_score_tells_the_level():
    for relative in (0.9, 0.3, 0.1, 0.3, 0.4, 0.9, 0.02):
        warning = warning_after(*[relative] * 20)
        again = warning_after(*[0.28] * 20, warning=warning)
        for each in (warning, again):
            is_critical = each.level.is_at_least(WarningLevel.CRITICAL)
            assert is_critical is (each.score >= CRITICAL_SCORE)
            assert each.level.is_at_least(WarningLevel.WARN) is (each.score >= WARN_SCORE)


@pytest.mark.parametrize("numbers", [{"ess": 1.4}, {"gradient_norm": 9e-6}])
def test_ten_steps_in_a_row_without_a_gradient_or_an_ess_are_dead(numbers):
    almost = warning_after(*[0.9] * (DEAD_STEPS - 1), **numbers)
    assert almost.level is WarningLevel.OK
    assert warning_after(0.9, warning=almost, **numbers).level is WarningLevel.DEAD
    assert warning_after(0.9, 0.9, warning=almost).level is WarningLevel.OK


def test_a_solved_batch_without_a_gradient_is_not_dead():
    assert warning_after(*[1.0] * 20, gradient_norm=None).level is WarningLevel.OK


@pytest.mark.parametrize("change", [{"mean": 1.5}, {"seen": -1}, {"dead_steps": -1}])
def test_a_state_out_of_range_is_refused(change):
    with pytest.raises(ValueError, match="give a mean in"):
        EarlyWarning(**change)


@pytest.mark.parametrize("name", ["relative_ess", "ess", "gradient_norm"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        StepHealth(**{"relative_ess": 0.5, name: value})


def test_levels_are_ordered_from_good_to_bad():
    assert WarningLevel.CRITICAL.is_at_least(WarningLevel.WARN)
    assert not WarningLevel.OK.is_at_least(WarningLevel.WARN)
