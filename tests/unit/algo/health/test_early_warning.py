import json

import pytest

from vcpo.algo import EarlyWarning, StepHealth, WarningLevel, WarningThresholds


def warning_after(*relative, warning=None, **numbers):
    warning = warning or EarlyWarning()
    for each in relative:
        warning = warning.observe(StepHealth(relative_ess=each, **numbers))
    return warning


@pytest.mark.parametrize(
    ("relative", "numbers", "level"),
    [
        ([0.9] * 10, {"kl_per_token": 1.5}, WarningLevel.OK),
        ([0.9] * 7 + [0.15] * 3, {"kl_per_token": 1.5}, WarningLevel.WARN),
        ([0.9] * 10 + [0.05] * 2, {"kl_per_token": 0.3}, WarningLevel.CRITICAL),
        ([0.9] * 10, {"ess": 1.0}, WarningLevel.DEAD),
    ],
    ids=["far but in effect", "dips", "bad steps", "one sample"],
)
def test_the_level_is_that_of_the_worst_signal(relative, numbers, level):
    assert warning_after(*relative, **numbers).level is level


def test_a_fall_under_a_high_median_is_seen():
    # One step in five is taken along three trajectories of 64; the median stays at 0.8.
    relative = [0.8, 0.8, 0.8, 0.8, 0.05] * 4
    assert warning_after(*relative, kl_per_token=0.2).level is WarningLevel.CRITICAL


def test_nothing_seen_is_nothing_wrong():
    assert (EarlyWarning().level, EarlyWarning().score) == (WarningLevel.OK, 0.0)


def test_a_run_that_recovers_is_well_again():
    relative = [0.05] * 10 + [1.0] * 10
    assert warning_after(*relative, kl_per_token=0.3).level is WarningLevel.OK


def test_steps_beyond_the_trailing_ones_are_forgotten():
    assert len(warning_after(*[1.0] * 80).steps) == 53


# (part of the on-policy ESS, KL per token) of the first steps of sort_digits, lag at most 6.
GOES_WELL = [(1.0, 0.0), (0.54, 0.12), (0.07, 0.32), (0.51, 0.28), (0.03, 0.54), (0.35, 0.43)]
"""Like learning rates of 3e-4: dips of one or two steps, and 0.9 in the end."""
FALLS_AT_ONCE = [(1.0, 0.0), (0.12, 0.87), (0.01, 1.5), (0.02, 2.33), (0.02, 2.14), (0.02, 2.21)]
"""At 1e-3: it never gets up again."""


def levels_of(start, then):
    warning, levels = EarlyWarning(), []
    for relative, kl in [*start, *then]:
        warning = warning.observe(StepHealth(relative_ess=relative, kl_per_token=kl))
        levels.append(warning.level)
    return levels


def test_a_stormy_start_is_not_critical_then_nor_later():
    levels = levels_of(GOES_WELL, [(0.7, 0.15)] * 30)
    assert not any(level.is_at_least(WarningLevel.CRITICAL) for level in levels)


def test_a_run_that_falls_at_once_is_critical_within_six_steps():
    assert levels_of(FALLS_AT_ONCE, [])[-1] is WarningLevel.CRITICAL


def test_two_bad_steps_are_critical_from_the_eleventh_step_on():
    start, bad = [(0.9, 0.3)], (0.05, 0.3)
    assert levels_of(start * 10, [bad, bad])[-1] is WarningLevel.CRITICAL
    assert levels_of(start * 8, [bad, bad])[-1] is WarningLevel.OK


def test_a_run_that_is_resumed_is_not_at_its_start_again():
    saved = json.loads(json.dumps(warning_after(*[0.9] * 60).to_dict()))
    resumed = EarlyWarning().restore(saved)
    assert (
        warning_after(0.05, 0.05, warning=resumed, kl_per_token=0.3).level is WarningLevel.CRITICAL
    )


def test_observing_leaves_the_earlier_warning_as_it_was():
    before = warning_after(0.5)
    before.observe(StepHealth(relative_ess=0.1))
    assert before == warning_after(0.5)


def test_steps_survive_a_checkpoint():
    before = warning_after(0.5, 0.2, ess=12.0, kl_per_token=0.1)
    assert EarlyWarning().restore(json.loads(json.dumps(before.to_dict()))) == before


def test_thresholds_come_from_the_run_and_not_from_the_checkpoint():
    mild = EarlyWarning(thresholds=WarningThresholds(dip_relative_ess=0.01))
    assert mild.restore(warning_after(*[0.15] * 3).to_dict()).level is WarningLevel.OK


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"steps": []},
        {"steps": None, "seen": 0},
        {"steps": [[1.0]], "seen": 1},
        {"steps": [["x", None, None, None]], "seen": 1},
        {"steps": [], "seen": "many"},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state):
    with pytest.raises(ValueError, match=r"give what to_dict of EarlyWarning returned"):
        EarlyWarning().restore(state)


def test_levels_are_ordered_from_good_to_bad():
    assert WarningLevel.CRITICAL.is_at_least(WarningLevel.WARN)
    assert not WarningLevel.OK.is_at_least(WarningLevel.WARN)
