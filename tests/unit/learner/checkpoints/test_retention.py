"""Which checkpoints stay on disk, and which one is the best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_learner.checkpoints.disk import best_evaluated_step, kept_steps


def test_the_best_is_the_most_accurate_that_has_a_checkpoint_and_the_latest_of_equal_ones():
    found = {0: 0.1, 50: 0.9, 100: 0.7, 150: 0.7, 200: 0.5}
    assert best_evaluated_step(found, [50, 100, 150]) == 50
    assert best_evaluated_step(found, [100, 150, 200]) == 150


def test_without_an_evaluation_none_is_the_best():
    assert best_evaluated_step({10: 0.5}, [20]) is None
    assert best_evaluated_step({}, [20]) is None


@pytest.mark.parametrize(
    ("steps", "good", "kept"),
    [
        ([50], [50], {50}),
        ([50, 100, 150], [50, 100, 150], {100, 150}),
        ([50, 100, 150], [50], {50, 150}),  # the last good one takes the place of 100
        ([50, 100, 150], [], {100, 150}),  # without rollbacks, or nothing is good
        ([5, 15, 20], [5, 15, 20], {5, 15, 20}),  # 5 is old enough, and 15 is the next to be
        ([5, 10, 25, 30], [5, 10, 25, 30], {10, 25, 30}),
    ],
)
def test_of_two_that_are_kept_one_is_old_and_good_enough_for_a_rollback(steps, good, kept):
    assert kept_steps(steps, keep=2, good=good, good_age_steps=11) == kept


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 60),
)
def test_however_checkpoints_follow_there_is_one_to_go_back_to_and_never_many(
    healthy, keep, every_steps, good_age_steps
):
    """Saved one by one, each time with what was kept before."""
    on_disk = []
    for number in range(1, len(healthy) + 1):
        step = number * every_steps
        on_disk = sorted({*on_disk, step})
        good = [one for one in on_disk if healthy[one // every_steps - 1]]
        kept = kept_steps(on_disk, keep=keep, good=good, good_age_steps=good_age_steps)
        assert step in kept
        assert len(kept) <= max(keep, 3)
        on_disk = sorted(kept)
        aged = [one for one in on_disk if one in good and one <= step - good_age_steps]
        was_good = [one * every_steps for one, well in enumerate(healthy[:number], 1) if well]
        if any(one <= step - 2 * good_age_steps - 2 * every_steps for one in was_good):
            assert aged
        # With nothing but good ones it is at most twice as old as needed, and two checkpoints.
        if all(healthy) and aged:
            assert max(aged) > step - 2 * good_age_steps - 3 * every_steps
