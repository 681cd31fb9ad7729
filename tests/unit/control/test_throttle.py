"""The lag limit halves under the ESS floor, once for each window, and recovers slowly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.plant import signals
from vcpo.control.throttle import (
    PROBE_STEPS,
    EssHealth,
    ThrottleState,
    ess_health,
    follow_learner,
    next_throttle,
    recovery_ratio,
)

FLOOR = 0.2


def after(
    throttle: ThrottleState, *healths: EssHealth, start: int = 1, most: int = 8
) -> ThrottleState:
    for step, health in enumerate(healths, start):
        throttle = next_throttle(throttle, health=health, step=step, max_policy_lag_steps=most)
    return throttle


def test_the_limit_is_halved_at_once_and_then_once_for_each_window_down_to_zero():
    throttle, lags = ThrottleState(lag_limit_steps=13), []
    for step in range(1, 46):
        throttle = after(throttle, EssHealth.BELOW_FLOOR, start=step, most=13)
        lags.append(throttle.lag_limit_steps)
    # The step under way and the ten of the window pass before the next halving is judged.
    assert lags == [6] * 11 + [3] * 11 + [1] * 11 + [0] * 12


def test_a_limit_that_was_raised_within_the_window_falls_back_to_what_was_set():
    throttle = after(ThrottleState(lag_limit_steps=8), EssHealth.BELOW_FLOOR)
    throttle = after(throttle, *[EssHealth.HEALTHY] * 5, start=2)
    assert throttle.lag_limit_steps == 5
    assert after(throttle, EssHealth.BELOW_FLOOR, start=7).lag_limit_steps == 4


def test_after_the_window_a_step_below_the_floor_halves_again_at_once():
    throttle = after(ThrottleState(lag_limit_steps=8), EssHealth.BELOW_FLOOR)
    throttle = after(throttle, *[EssHealth.NEAR_FLOOR] * 20, start=2)
    assert after(throttle, EssHealth.BELOW_FLOOR, start=22).lag_limit_steps == 2


def test_near_the_floor_a_limit_of_zero_is_left_after_fifty_steps_and_stays_at_one():
    throttle, lags = ThrottleState(lag_limit_steps=0), []
    for step in range(1, 501):
        throttle = after(throttle, EssHealth.NEAR_FLOOR, start=step)
        lags.append(throttle.lag_limit_steps)
    assert lags == [0] * 49 + [1] * 451


def test_one_step_below_the_floor_restarts_the_recovery():
    healths = [EssHealth.NEAR_FLOOR] * 49 + [EssHealth.BELOW_FLOOR] + [EssHealth.NEAR_FLOOR] * 49
    throttle = after(ThrottleState(lag_limit_steps=0), *healths)
    assert throttle.lag_limit_steps == 0
    assert after(throttle, EssHealth.NEAR_FLOOR, start=100).lag_limit_steps == 1


@pytest.mark.parametrize(("healthy_steps", "lag"), [(4, 2), (5, 3), (9, 3), (10, 4), (100, 8)])
def test_every_fifth_healthy_step_adds_one_up_to_the_maximum(healthy_steps, lag):
    throttle = after(ThrottleState(lag_limit_steps=2), *[EssHealth.HEALTHY] * healthy_steps)
    assert throttle.lag_limit_steps == lag


def test_a_step_near_the_floor_keeps_the_lag_and_restarts_the_count():
    healths = [EssHealth.HEALTHY] * 4 + [EssHealth.NEAR_FLOOR] + [EssHealth.HEALTHY] * 4
    throttle = after(ThrottleState(lag_limit_steps=2), *healths)
    assert throttle == ThrottleState(lag_limit_steps=2, progress=40, judged_step=9)


def test_many_steps_between_two_decisions_add_one_at_most():
    throttle = ThrottleState(lag_limit_steps=2, judged_step=1)
    throttle = after(throttle, EssHealth.HEALTHY, start=500)
    assert throttle.lag_limit_steps == 3


@pytest.mark.parametrize("health", EssHealth)
def test_a_warning_sets_the_limit_to_zero_at_once_whatever_the_ess(health):
    throttle = ThrottleState(lag_limit_steps=48, judged_step=3)
    cut = next_throttle(throttle, health=health, is_warned=True, step=4, max_policy_lag_steps=48)
    assert cut == ThrottleState(lag_limit_steps=0, judged_step=4, tightened_step=4)


def test_while_the_warning_lasts_the_limit_stays_at_zero_and_after_it_it_recovers():
    throttle, lags = ThrottleState(lag_limit_steps=8), []
    for step in range(1, 31):
        throttle = next_throttle(
            throttle,
            health=EssHealth.HEALTHY,
            is_warned=step <= 12,
            step=step,
            max_policy_lag_steps=8,
        )
        lags.append(throttle.lag_limit_steps)
    # Five healthy steps for each step of the limit, counted from the end of the warning.
    assert lags == [0] * 16 + [1] * 5 + [2] * 5 + [3] * 4


def looked_at(throttle: ThrottleState, *, step: int, learner_limit_steps: int) -> ThrottleState:
    """The throttle after a look at a healthy step of a learner under this limit."""
    after = next_throttle(throttle, health=EssHealth.HEALTHY, step=step, max_policy_lag_steps=8)
    return follow_learner(after, throttle, learner_limit_steps=learner_limit_steps, step=step)


def test_a_limit_that_the_learner_lowered_between_two_looks_is_where_recovery_starts():
    throttle = ThrottleState(lag_limit_steps=8, progress=30, judged_step=10)
    followed = looked_at(throttle, step=60, learner_limit_steps=0)
    assert followed == ThrottleState(lag_limit_steps=0, judged_step=60, tightened_step=60)


@pytest.mark.parametrize(
    ("learner_limit_steps", "step"),
    [
        pytest.param(3, 11, id="the same limit"),
        pytest.param(8, 11, id="a restarted learner has a larger one"),
        pytest.param(0, 10, id="a report from before the last decision"),
    ],
)
def test_the_host_follows_the_learner_down_and_only_with_news(learner_limit_steps, step):
    throttle = ThrottleState(lag_limit_steps=3, judged_step=10)
    assert looked_at(throttle, step=step, learner_limit_steps=learner_limit_steps) == looked_at(
        throttle, step=step, learner_limit_steps=99
    )


def test_unknown_ess_holds_the_lag():
    throttle = ThrottleState(lag_limit_steps=3, progress=20, judged_step=4)
    assert after(throttle, EssHealth.UNKNOWN, start=5) == throttle


def test_a_learner_gone_back_to_a_checkpoint_is_followed_from_there():
    throttle = ThrottleState(
        lag_limit_steps=4, progress=30, judged_step=90, tightened_step=85, tightened_lag_steps=4
    )
    back = after(throttle, EssHealth.BELOW_FLOOR, start=50)
    assert back == ThrottleState(lag_limit_steps=4, judged_step=50, tightened_lag_steps=4)
    assert after(back, EssHealth.BELOW_FLOOR, start=51).lag_limit_steps == 2


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


HEALTHS = [EssHealth.BELOW_FLOOR, EssHealth.NEAR_FLOOR, EssHealth.HEALTHY]
"""From the lowest ESS to the highest."""


@st.composite
def throttles(draw: st.DrawFn) -> ThrottleState:
    """Any state after the look at step 0 of a run with a limit of at most 12."""
    return ThrottleState(
        lag_limit_steps=draw(st.integers(0, 12)),
        progress=draw(st.integers(0, PROBE_STEPS - 1)),
        judged_step=0,
        tightened_step=draw(st.none() | st.integers(-30, 0)),
        tightened_lag_steps=draw(st.integers(0, 12)),
    )


def limits_after(throttle: ThrottleState, healths: list[EssHealth]) -> list[int]:
    """The limit after each step."""
    lags = []
    for step, health in enumerate(healths, 1):
        throttle = next_throttle(throttle, health=health, step=step, max_policy_lag_steps=12)
        lags.append(throttle.lag_limit_steps)
    return lags


@settings(deadline=None)
@given(
    throttles(),
    st.lists(st.booleans(), max_size=30),
    st.lists(st.sampled_from(HEALTHS[1:]), min_size=50, max_size=60),
)
def test_from_every_state_a_run_that_is_well_again_leaves_zero(throttle, warnings, healths):
    for step, is_warned in enumerate(warnings, 1):
        throttle = next_throttle(
            throttle,
            health=EssHealth.NEAR_FLOOR,
            is_warned=is_warned,
            step=step,
            max_policy_lag_steps=12,
        )
    start = len(warnings) + 1
    for step, health in enumerate(healths, start):
        throttle = next_throttle(throttle, health=health, step=step, max_policy_lag_steps=12)
    assert throttle.lag_limit_steps >= 1


@settings(deadline=None)
@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(HEALTHS), st.sampled_from(HEALTHS[1:])), max_size=120),
)
def test_a_run_that_is_never_below_the_floor_never_has_the_smaller_limit(start, pairs):
    worse = [min(pair, key=HEALTHS.index) for pair in pairs]
    better = [max(pair, key=HEALTHS.index) for pair in pairs]
    throttle = ThrottleState(lag_limit_steps=start)
    together = zip(limits_after(throttle, worse), limits_after(throttle, better), strict=True)
    assert all(lower <= higher for lower, higher in together)
