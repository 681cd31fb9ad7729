"""The admission lag halves under the ESS floor and recovers slowly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.scenes import signals
from vcpo.control.throttle import (
    RECOVERY_STEPS,
    EssHealth,
    Throttle,
    ess_health,
    next_throttle,
    recovery_ratio,
)

FLOOR = 0.2


def after(throttle: Throttle, *healths: EssHealth, start: int = 1, most: int = 8) -> Throttle:
    for step, health in enumerate(healths, start):
        throttle = next_throttle(throttle, health=health, step=step, max_lag_steps=most)
    return throttle


def test_each_new_step_below_the_floor_halves_the_lag_down_to_zero():
    throttle = Throttle(admission_lag_steps=13)
    lags = []
    for step in range(1, 6):
        throttle = after(throttle, EssHealth.BELOW_FLOOR, start=step, most=13)
        lags.append(throttle.admission_lag_steps)
    assert lags == [6, 3, 1, 0, 0]


def test_a_second_look_at_the_same_step_changes_nothing():
    once = after(Throttle(admission_lag_steps=8), EssHealth.BELOW_FLOOR, start=7)
    assert after(once, EssHealth.BELOW_FLOOR, start=7) == once
    assert once.admission_lag_steps == 4


@pytest.mark.parametrize(("healthy_steps", "lag"), [(4, 2), (5, 3), (9, 3), (10, 4), (100, 8)])
def test_every_fifth_healthy_step_adds_one_up_to_the_maximum(healthy_steps, lag):
    throttle = after(Throttle(admission_lag_steps=2), *[EssHealth.HEALTHY] * healthy_steps)
    assert throttle.admission_lag_steps == lag


def test_a_step_near_the_floor_keeps_the_lag_and_restarts_the_count():
    healths = [EssHealth.HEALTHY] * 4 + [EssHealth.NEAR_FLOOR] + [EssHealth.HEALTHY] * 4
    throttle = after(Throttle(admission_lag_steps=2), *healths)
    assert throttle == Throttle(admission_lag_steps=2, healthy_steps=4, judged_step=9)


def test_many_steps_between_two_looks_add_one_at_most():
    throttle = Throttle(admission_lag_steps=2, judged_step=1)
    throttle = after(throttle, EssHealth.HEALTHY, start=500)
    assert throttle.admission_lag_steps == 3


def test_unknown_ess_holds_the_lag():
    throttle = Throttle(admission_lag_steps=3, healthy_steps=2, judged_step=4)
    assert after(throttle, EssHealth.UNKNOWN, start=5) == throttle


def test_a_learner_gone_back_to_a_checkpoint_is_followed_from_there():
    throttle = Throttle(admission_lag_steps=4, healthy_steps=3, judged_step=90)
    back = after(throttle, EssHealth.BELOW_FLOOR, start=50)
    assert back == Throttle(admission_lag_steps=4, judged_step=50)
    assert after(back, EssHealth.BELOW_FLOOR, start=51).admission_lag_steps == 2


@pytest.mark.parametrize(
    ("mean", "low", "expected"),
    [
        pytest.param(None, None, EssHealth.UNKNOWN, id="before the first step"),
        pytest.param(0.09, None, EssHealth.BELOW_FLOOR, id="18 % of on-policy"),
        pytest.param(0.10, None, EssHealth.NEAR_FLOOR, id="20 %, exactly the floor"),
        pytest.param(0.14, None, EssHealth.NEAR_FLOOR, id="28 %, below 1.5 floors"),
        pytest.param(0.16, None, EssHealth.HEALTHY, id="32 %, above 1.5 floors"),
        pytest.param(0.16, 0.09, EssHealth.NEAR_FLOOR, id="low percentile below the floor"),
        pytest.param(0.16, 0.10, EssHealth.HEALTHY, id="low percentile at the floor"),
        pytest.param(0.9, None, EssHealth.HEALTHY, id="above on-policy"),
    ],
)
def test_ess_is_judged_as_a_share_of_the_on_policy_ratio(mean, low, expected):
    seen = signals(on_policy_ess_ratio=0.5, ess_ratio_mean=mean, ess_ratio_low=low)
    assert ess_health(FLOOR, seen) is expected


@pytest.mark.parametrize(("floor", "expected"), [(0.1, 0.15), (0.5, 0.75), (0.8, 0.9), (1.0, 1.0)])
def test_recovery_stays_within_reach_of_any_floor(floor, expected):
    assert recovery_ratio(floor) == pytest.approx(expected)


SHARES = st.floats(0.0, 1.0)


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(SHARES, SHARES), max_size=60),
    start=st.integers(0, 12),
    floor=st.floats(0.01, 1.0),
)
def test_a_run_whose_ess_is_never_higher_never_has_the_larger_lag(pairs, start, floor):
    low = high = Throttle(admission_lag_steps=start)
    for step, pair in enumerate(pairs, start=1):
        judged = [
            ess_health(floor, signals(ess_ratio_mean=share, on_policy_ess_ratio=1.0))
            for share in sorted(pair)
        ]
        low = next_throttle(low, health=judged[0], step=step, max_lag_steps=12)
        high = next_throttle(high, health=judged[1], step=step, max_lag_steps=12)
        assert low.admission_lag_steps <= high.admission_lag_steps


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(EssHealth)), max_size=60),
    most=st.integers(0, 20),
)
def test_the_lag_stays_between_zero_and_the_maximum(steps, most):
    throttle = Throttle(admission_lag_steps=most)
    for step, health in steps:
        throttle = next_throttle(throttle, health=health, step=step, max_lag_steps=most)
        assert 0 <= throttle.admission_lag_steps <= most
        assert 0 <= throttle.healthy_steps < RECOVERY_STEPS
