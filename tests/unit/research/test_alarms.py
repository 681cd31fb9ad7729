"""The early warning, judged on cells whose ESS ratio on policy is 0.8."""

from __future__ import annotations

from research.measures import first_alarm
from tests.fixtures.study import steps as columns
from vcpo.algo.health.early_warning import WarningLevel

WARN, CRITICAL = WarningLevel.WARN, WarningLevel.CRITICAL


def steps(*ratios, on_policy=0.8):
    number = len(ratios)
    return columns(
        number,
        ess_ratio=ratios,
        on_policy_ess_ratio=(on_policy,) * number,
        ess=tuple(64 * ratio for ratio in ratios),
    )


def test_steps_that_are_low_on_average_are_critical():
    # After n steps at 0.1 the mean is about 0.1 + 0.9 * 0.8^n: 0.25 after 8 and 0.22 after 9.
    assert first_alarm(steps(*[0.8] * 16, *[0.08] * 24), CRITICAL) == 25


def test_few_low_steps_only_warn():
    few = steps(*[0.8] * 16, *[0.08] * 7, *[0.8] * 17)
    assert (first_alarm(few, WARN), first_alarm(few, CRITICAL)) == (23, None)


def test_an_ess_that_is_as_low_on_policy_raises_nothing():
    assert first_alarm(steps(*[0.2] * 40, on_policy=0.2), WARN) is None
