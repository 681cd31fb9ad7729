"""Shares that signals derive from the record of the last step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.control.plant import signals
from vcpo.control.supervision import FailureStreak


def test_relative_ess_is_a_share_of_the_on_policy_ratio():
    seen = signals(ess_ratio_mean=0.2, ess_ratio_low=0.1, on_policy_ess_ratio=0.8)
    assert (seen.relative_ess_ratio_mean, seen.relative_ess_ratio_low) == (0.25, 0.125)


def test_relative_ess_is_one_where_the_batch_beats_the_calibration():
    assert signals(ess_ratio_mean=0.9, on_policy_ess_ratio=0.6).relative_ess_ratio_mean == 1.0


def test_a_step_whose_weights_have_no_value_has_no_ess():
    assert signals(ess_ratio=0.0).relative_ess_ratio is None


def streak_of(*progress: int) -> FailureStreak:
    streak = FailureStreak()
    for reached in progress:
        streak = streak.after_failure(reached)
    return streak


def test_failures_without_progress_add_up():
    assert [streak_of(*[0] * n).failures for n in range(4)] == [0, 1, 2, 3]


def test_progress_begins_a_new_streak():
    assert streak_of(0, 0, 7).failures == 1


def test_what_is_only_done_again_is_no_progress():
    # From the checkpoint of step 50 to step 60, every time.
    assert streak_of(60, 60, 60).failures == 3


def test_less_than_before_is_no_progress_and_forgets_nothing():
    streak = streak_of(60, 55)
    assert (streak.failures, streak.progress) == (2, 60)


def test_the_pause_doubles_up_to_a_minute():
    pauses_s = [streak_of(*[0] * n).pause_s for n in range(11)]
    assert pauses_s == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@given(st.integers(min_value=0, max_value=10**9))
def test_a_pause_is_never_longer_than_a_minute(failures: int):
    assert 0 <= FailureStreak(failures=failures).pause_s <= 60


@given(st.lists(st.integers(min_value=0, max_value=20), max_size=50))
def test_a_streak_is_as_long_as_the_list_since_the_last_record(progress: list[int]):
    records = [at for at, reached in enumerate(progress) if reached > max(progress[:at], default=0)]
    expected = len(progress) - records[-1] if records else len(progress)
    assert streak_of(*progress).failures == expected
