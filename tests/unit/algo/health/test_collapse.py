import math
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vcpo.algo.health.collapse import (
    RewardWatch,
    find_collapse,
    near_rewards,
    num_low_at_end,
    reward_limits,
    share_error,
)


def values_of(*numbers):
    return list(enumerate(numbers))


def test_a_fall_below_half_of_the_best_is_found_with_its_numbers():
    found = find_collapse(values_of(0.2, 0.9, 0.46, 0.44, 0.1, 0.3))
    assert (found.step, found.value) == (3, 0.44)
    assert (found.best, found.best_step, found.last) == (0.9, 1, 0.3)


@pytest.mark.parametrize(
    "numbers", [(), (0.5,), (0.0, 0.0), (0.2, 0.8, 0.4), (-0.2, -0.9), (0.0, -1.0)]
)
def test_without_such_a_fall_there_is_no_collapse(numbers):
    assert find_collapse(values_of(*numbers)) is None


@pytest.mark.parametrize(
    ("best", "num_rewards", "is_collapse"),
    [
        (1 / 16, 16, False),  # three standard errors are 3 sqrt(1/16 * 15/16 / 16) = 0.18
        (0.375, 16, True),  # 3 sqrt(0.375 * 0.625 / 16) = 0.363
        (0.375, 15, False),  # 0.375, and the fall is not above it
        (0.02, 512, True),  # 0.0186
        (0.02, 256, False),  # 0.0262
        (0.02, None, True),
        (1.0, 1, True),
        (5.0, 1, True),
    ],
)
def test_a_fall_to_zero_of_a_mean_of_few_rewards_may_be_chance(best, num_rewards, is_collapse):
    error = 0.0 if num_rewards is None else share_error(best, num_rewards)
    found = find_collapse(values_of(best, 0.0), errors=[error, 0.0])
    assert (found is not None) is is_collapse


@pytest.mark.parametrize(
    ("numbers", "num_low"),
    [
        ((), 0),
        ((0.72,), 0),
        ((0.35, 0.72, 0.41, 0.43), 2),  # 0.8 of 0.72 is 0.576
        ((0.72, 0.58, 0.57), 1),
        ((0.72, 0.41, 0.43, 0.6), 0),
        ((0.72, 0.41, 0.6, 0.41), 1),
        ((0.0, 0.0, -1.0), 0),
        ((-0.5, -0.9), 0),
    ],
)
def test_the_last_values_below_eight_tenths_of_the_best_before_them_are_counted(numbers, num_low):
    assert num_low_at_end(numbers, errors=[0.0] * len(numbers)) == num_low


@pytest.mark.parametrize(("last", "has_recovered"), [(0.80, True), (0.79, False), (2.0, True)])
def test_a_measure_near_its_best_before_has_recovered(last, has_recovered):
    assert find_collapse(values_of(1.0, 0.1, last)).has_recovered is has_recovered


@given(st.lists(st.floats(0.01, 1.0)), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_scale_of_a_reward_does_not_matter(numbers, factor):
    found = find_collapse(values_of(*numbers))
    scaled = find_collapse(values_of(*(factor * number for number in numbers)))
    assert (found and found.step) == (scaled and scaled.step)


def watched(*steps, batch=64):
    """A watch after steps whose rewards are all the same, or after these rewards of each step."""
    watch = RewardWatch()
    for step in steps:
        watch = watch.observe({"": step if isinstance(step, list) else [step] * batch})
    return watch


def first_collapse(steps):
    watch = RewardWatch()
    for number, rewards in enumerate(steps, start=1):
        watch = watch.observe(rewards if isinstance(rewards, dict) else {"": rewards})
        if watch.has_collapsed:
            return number
    return None


def test_a_watch_compares_the_last_ten_steps_with_the_best_ten_before():
    # The means of the windows fall by 0.08 with each step at 0, from 0.8: 0.4 is half of it.
    healthy = [0.8] * 10
    assert not watched(*healthy, *[0.0] * 5).has_collapsed
    fallen = watched(*healthy, *[0.0] * 6)
    assert fallen.has_collapsed
    assert fallen.best.value == pytest.approx(0.8)
    assert fallen.last.value == pytest.approx(0.32)


def test_a_fall_within_chance_is_no_collapse():
    # One reward of 10 is 1. Means of 10 x 10 have three errors of 3 sqrt(0.1 * 0.9 / 100) = 0.09,
    # less than a fall from 0.1 to 0; means of 10 x 5 in which 5 are 1 have 0.127.
    assert watched(*[[1.0] + [0.0] * 9] * 10, *[0.0] * 10).has_collapsed
    few = [[1.0] + [0.0] * 4, [0.0] * 5] * 5
    assert not watched(*few, *[0.0] * 10, batch=5).has_collapsed


def test_the_error_of_a_mean_is_that_of_its_rewards_whatever_their_scale():
    # 20 of 100 rewards are 8: the deviation is 8 sqrt(0.2 * 0.8), over sqrt(100).
    watch = watched(*[[8.0, 0.0, 0.0, 0.0] * 2 + [0.0, 8.0], [8.0, 0.0] + [0.0] * 8] * 5)
    assert watch.last.value == pytest.approx(1.6)
    assert watch.last.error == pytest.approx(8.0 * math.sqrt(0.2 * 0.8) / 10.0)


def test_four_rewards_of_ten_thousand_do_not_collapse_a_healthy_run_nor_hide_a_collapse():
    healthy, wrong = [1.0, 0.0] * 32, [1e4] * 4 + [1.0, 0.0] * 30
    steps = [*[healthy] * 11, wrong, *[healthy] * 27, wrong, *[healthy] * 20]
    assert first_collapse(steps) is None
    assert watched(*steps).last.value == 0.5
    # The best window has 322 of 640: two of the wrong ones replace zeros. Half of it is 161. Five
    # steps of zeros leave 160, and 164 with four wrong ones, which count as good ones.
    assert first_collapse([*steps, *[[0.0] * 64] * 10]) == 60 + 5
    assert first_collapse([*steps, *[[0.0] * 60 + [1e4] * 4] * 1, *[[0.0] * 64] * 9]) == 60 + 6


@pytest.mark.parametrize("good", [1.0, 10.0, 1e4])
def test_rare_good_rewards_count_in_full(good):
    # 2 of 64 rewards are good, 3 %: 20 of a window, whose mean has three errors of 0.66 of it.
    rare = [good] * 2 + [0.0] * 62
    watch = watched(*[rare] * 10)
    assert watch.last.value == pytest.approx(good * 2 / 64)
    assert first_collapse([*[rare] * 20, *[[0.0] * 64] * 10]) == 30 - 10 + 7


def test_far_rewards_are_told_from_the_others_however_many_up_to_a_tenth():
    # The median is 0, and nine tenths are at most 1 away; of rare good rewards four are left out.
    near = [1.0] * 10 + [0.0] * 50
    assert reward_limits([*near, *[300.0] * 6]) == (-100.0, 100.0)
    rare = [1.0] * 2 + [0.0] * 58
    assert reward_limits([*rare, -1e4, 1e4, 2e3, 1e3]) == (-1e3, 1e3)
    assert reward_limits([*rare, 1.0, 1.0, -1e4, 1e4, 2e3, 1e3]) == (-1e2, 1e2)
    assert near_rewards([1.0] * 5 + [0.0] * 60 + [-1e4]) == [1.0] * 5 + [0.0] * 60


def test_equal_rewards_are_not_far_from_each_other():
    assert near_rewards([3.0] * 5) == [3.0] * 5
    assert near_rewards([0.0] * 63 + [1.0]) == [0.0] * 63 + [1.0]
    assert RewardWatch().limits is None


VALUES = [-1e4, -1.0, 0.0, 1.0, 2.0, 50.0, 1e4]
HEALTHY = st.one_of(
    st.tuples(st.integers(0, 16), st.sampled_from([1.0, 0.1, 5.0, 1e4])).map(
        lambda one: [one[1]] * one[0] + [0.0] * (16 - one[0])
    ),
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=16),
)
WRONG = st.lists(
    st.tuples(
        st.integers(0, 29),
        st.integers(0, 3),
        st.one_of(st.floats(-1e4, 1e4), st.sampled_from(VALUES)),
    ),
    max_size=4,
)


def with_wrong(steps, wrong, num_workers):
    """The steps of a fleet, each worker with these rewards, and a few of them replaced."""
    bent = [{at: list(rewards) for at in range(num_workers)} for rewards in steps]
    for step, place, reward in wrong:
        bent[step][(step + place) % num_workers][place] = reward
    return bent


@settings(max_examples=150, deadline=None)
@given(HEALTHY, WRONG, st.integers(1, 8))
@example([1.0, 0.0] * 2, [(at, 0, -1e4) for at in (20, 21, 24, 25)], 4)
def test_no_four_rewards_collapse_a_healthy_run(rewards, wrong, num_workers):
    assert first_collapse(with_wrong([rewards] * 40, wrong, num_workers)) is None


@settings(max_examples=150, deadline=None)
@given(st.integers(3, 16), st.sampled_from([1.0, 0.1, 5.0, 1e4]), WRONG, st.integers(1, 8))
def test_no_four_rewards_hide_a_collapse(num_good, good, wrong, num_workers):
    # 3 of 16 are 30 of a window: 26 of them are still 5 standard errors above 0.
    rewards = [good] * num_good + [0.0] * (16 - num_good)
    steps = with_wrong([*[rewards] * 20, *[[0.0] * 16] * 10], wrong, num_workers)
    assert first_collapse(steps) is not None


@pytest.mark.parametrize("num_workers", [2, 3, 8, 64])
def test_a_collapse_of_all_workers_is_found_as_soon_as_one_of_one_worker(num_workers):
    fallen = [*[[1.0, 0.0] * 32] * 20, *[[0.0] * 64] * 10]
    fleet = [{f"w{at}": rewards[at % 8 :] for at in range(num_workers)} for rewards in fallen]
    assert first_collapse(fleet) == first_collapse(fallen) == 26


@settings(max_examples=100, deadline=None)
@given(HEALTHY, st.integers(3, 20), st.lists(st.sampled_from(VALUES), min_size=40, max_size=40))
def test_no_rewards_of_less_than_half_of_the_workers_make_a_collapse(rewards, num_workers, junk):
    num_bad = (num_workers - 1) // 2 - num_workers // 16
    fleet = {f"w{at}": rewards for at in range(num_bad, num_workers)}
    steps = [fleet | {f"w{at}": [value] * len(rewards) for at in range(num_bad)} for value in junk]
    assert first_collapse(steps) is None
    if fmean(rewards) > 0.2 * max(rewards) > 0.0 and len(rewards) > 15 and num_workers < 16:
        fallen = dict.fromkeys(fleet, [0.0] * len(rewards))
        assert first_collapse([*steps, *[step | fallen for step in steps[:10]]]) is not None


def test_who_just_came_has_no_say_and_the_worker_that_fell_is_named():
    steps = [{"a": [1.0] * 60}] * 10 + [{"a": [1.0] * 60, "new": [0.0]}] * 10
    assert first_collapse(steps) is None
    watch = RewardWatch()
    for value in [1.0] * 10 + [0.0] * 10:
        watch = watch.observe({"a": [value] * 4, "b": [value / 2] * 8})
    assert watch.fall == ("the mean reward of 10 steps fell from 0.5 to 0, most at a: 1 to 0")


@given(st.lists(st.floats(-1.0, 1.0), max_size=40))
def test_a_watch_finds_what_is_found_after_the_fact(rewards):
    watches = [watched(*rewards[: end + 1]) for end in range(len(rewards))]
    windows = [(end, watch.last) for end, watch in enumerate(watches, start=1) if watch.last]
    found = find_collapse(
        [(end, last.value) for end, last in windows], errors=[last.error for _, last in windows]
    )
    first = next((end for end, watch in enumerate(watches, start=1) if watch.has_collapsed), None)
    assert first == (None if found is None else found.step)
