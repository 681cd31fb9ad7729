import json

import pytest

from vcpo.algo import EarlyWarning, StepHealth, WarningLevel, WarningThresholds


def watched(*relative, **numbers):
    warning = EarlyWarning()
    for each in relative:
        warning = warning.observe(StepHealth(relative_ess=each, **numbers))
    return warning


@pytest.mark.parametrize(
    ("relative", "numbers", "level"),
    [
        ([0.9] * 10, {"kl_per_token": 1.5}, WarningLevel.OK),
        ([0.9] * 7 + [0.15] * 3, {"kl_per_token": 1.5}, WarningLevel.WARN),
        ([0.9] * 8 + [0.05] * 2, {"kl_per_token": 0.3}, WarningLevel.CRITICAL),
        ([0.9] * 10, {"ess": 1.0}, WarningLevel.DEAD),
    ],
    ids=["far but in effect", "dips", "bad steps", "one sample"],
)
def test_the_level_is_that_of_the_worst_signal(relative, numbers, level):
    assert watched(*relative, **numbers).level is level


def test_a_fall_under_a_high_median_is_seen():
    # One step in five is taken along three trajectories of 64; the median stays at 0.8.
    relative = [0.8, 0.8, 0.8, 0.8, 0.05] * 4
    assert watched(*relative, kl_per_token=0.2).level is WarningLevel.CRITICAL


def test_nothing_seen_is_nothing_wrong():
    assert (EarlyWarning().level, EarlyWarning().score) == (WarningLevel.OK, 0.0)


def test_a_run_that_recovers_is_well_again():
    relative = [0.05] * 10 + [1.0] * 10
    assert watched(*relative, kl_per_token=0.3).level is WarningLevel.OK


def test_steps_beyond_the_trailing_ones_are_forgotten():
    assert len(watched(*[1.0] * 80).steps) == 53


def test_observing_leaves_the_earlier_warning_as_it_was():
    before = watched(0.5)
    before.observe(StepHealth(relative_ess=0.1))
    assert before == watched(0.5)


def test_steps_survive_a_checkpoint():
    before = watched(0.5, 0.2, ess=12.0, kl_per_token=0.1)
    assert EarlyWarning().restored(json.loads(json.dumps(before.to_dict()))) == before


def test_thresholds_come_from_the_run_and_not_from_the_checkpoint():
    mild = EarlyWarning(thresholds=WarningThresholds(dip_relative_ess=0.01))
    assert mild.restored(watched(*[0.15] * 3).to_dict()).level is WarningLevel.OK


@pytest.mark.parametrize(
    "state",
    [{}, {"steps": None}, {"steps": [[1.0]]}, {"steps": [["x", None, None, None]]}],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state):
    with pytest.raises(ValueError, match=r"give what to_dict of EarlyWarning returned"):
        EarlyWarning().restored(state)


def test_levels_are_ordered_from_good_to_bad():
    assert WarningLevel.CRITICAL.is_at_least(WarningLevel.WARN)
    assert not WarningLevel.OK.is_at_least(WarningLevel.WARN)
