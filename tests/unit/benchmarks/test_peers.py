"""The comparison with TRL's trainer: when a reward was reached, and the ratios."""

from __future__ import annotations

from benchmarks.peers.__main__ import comparison
from benchmarks.peers.training import Step, steps_to, summary

REWARDS = 0.9, 0.95


def steps(rewards, cpu_seconds=2.0):
    return [
        Step(
            reward=reward,
            seconds=float(number),
            cpu_seconds=cpu_seconds * number,
            peak_gibibytes=1.0,
        )
        for number, reward in enumerate(rewards)
    ]


def test_a_reward_is_reached_when_the_mean_of_five_steps_is():
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert steps_to(steps(rewards), 0.95) == 6
    assert steps_to(steps(rewards), 0.8) == 5
    assert steps_to(steps(rewards[:5]), 0.9) is None


def test_ratios_are_of_what_it_took_to_the_higher_reward():
    # 6 steps of TRL at 2 s of CPU each, 8 of ours at 3 s; clocks begin after the first.
    theirs, ours = [0.0] + [1.0] * 6, [0.0] * 3 + [1.0] * 6
    sides = {
        "trl": summary(steps(theirs), REWARDS),
        "on_policy": summary(steps(ours, cpu_seconds=3.0), REWARDS),
        "asynchronous": summary(steps(theirs), REWARDS),
    }
    found = comparison(sides, 0.95)
    assert found["steps_ratio"] == round(8 / 6, 3)
    assert found["cpu_seconds_ratio"] == round(7 * 3 / (5 * 2), 3)
    assert found["cpu_seconds_per_step_ratio"] == 1.5
    assert found["wall_ratio_async"] == 1.0
    assert found["final_reward_difference"] == 0.0


def test_a_side_that_did_not_get_there_has_no_ratio():
    names = "trl", "on_policy", "asynchronous"
    sides = {name: summary(steps([0.0] * 8), REWARDS) for name in names}
    assert comparison(sides, 0.95)["steps_ratio"] is None
