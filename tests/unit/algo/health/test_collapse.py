import json
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo import RewardWatch
from vcpo.algo.health.collapse import find_collapse


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
    found = find_collapse(values_of(best, 0.0), num_rewards=num_rewards)
    assert (found is not None) is is_collapse


def test_a_reward_that_falls_below_zero_has_collapsed():
    assert find_collapse(values_of(0.5, -0.5)).step == 1


@pytest.mark.parametrize(("last", "has_recovered"), [(0.80, True), (0.79, False), (2.0, True)])
def test_a_measure_near_its_best_before_has_recovered(last, has_recovered):
    assert find_collapse(values_of(1.0, 0.1, last)).has_recovered is has_recovered


@given(st.lists(st.floats(0.01, 1.0)), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_scale_of_a_reward_does_not_matter(numbers, factor):
    found = find_collapse(values_of(*numbers))
    scaled = find_collapse(values_of(*(factor * number for number in numbers)))
    assert (found and found.step) == (scaled and scaled.step)


@given(st.lists(st.floats(0.5, 1.0)))
def test_values_within_a_factor_of_two_never_collapse(numbers):
    assert find_collapse(values_of(*numbers)) is None


def watched(*rewards, batch_rewards=64):
    watch = RewardWatch(batch_rewards=batch_rewards)
    for reward in rewards:
        watch = watch.observe(reward)
    return watch


def test_a_watch_compares_the_last_ten_steps_with_the_best_ten_before():
    # The means of the windows fall by 0.08 with each step at 0, from 0.8: 0.4 is half of it.
    healthy = [0.8] * 10
    assert not watched(*healthy, *[0.0] * 5).has_collapsed
    fallen = watched(*healthy, *[0.0] * 6)
    assert fallen.has_collapsed
    assert (fallen.best, fallen.value) == (0.8, pytest.approx(0.32))


def test_a_run_of_fewer_steps_than_a_window_and_one_has_not_collapsed():
    assert not watched(*[1.0] * 5, *[0.0] * 5).has_collapsed


def test_a_fall_within_chance_is_no_collapse():
    # Means of 10 x 2 rewards: 3 sqrt(0.1 * 0.9 / 20) = 0.2 is more than a fall from 0.1 to 0.
    rewards = [0.1] * 10 + [0.0] * 10
    assert not watched(*rewards, batch_rewards=2).has_collapsed
    assert watched(*rewards, batch_rewards=64).has_collapsed


@given(st.lists(st.floats(-1.0, 1.0), max_size=40))
def test_a_watch_finds_what_is_found_after_the_fact(rewards):
    ends = range(10, len(rewards) + 1)
    values = [(end, fmean(rewards[end - 10 : end])) for end in ends]
    found = find_collapse(values, num_rewards=640)
    first = next(
        (end for end in range(1, len(rewards) + 1) if watched(*rewards[:end]).has_collapsed), None
    )
    assert first == (None if found is None else found.step)


def test_a_watch_survives_a_checkpoint():
    watch = watched(*[0.1 * number for number in range(15)])
    state = json.loads(json.dumps(watch.to_dict()))
    assert RewardWatch(batch_rewards=64).restore(state) == watch


@pytest.mark.parametrize(
    "state", [{}, {"latest": ["x"], "best": 1}, {"latest": [], "best": float("inf")}]
)
def test_rewards_of_another_form_are_refused(state):
    with pytest.raises(ValueError, match="state is"):
        watched().restore(state)
