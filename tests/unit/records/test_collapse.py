"""The verdict on a recorded run, and its words."""

from __future__ import annotations

from dataclasses import replace

from tests.fixtures.records import evaluation_record, step_record
from vcpo.algo.health.collapse import RewardWatch
from vcpo.records.collapse import (
    Measure,
    collapse_notice,
    critical_at_end_notice,
    lasting_collapse_notice,
    run_collapse,
)
from vcpo.records.journal import Metrics


def metrics_of(rewards=(), accuracies=(), levels=(), consumed_per_step=128):
    """Steps 1, 2, ... with these rewards and warning levels; evaluations at steps 0, 10, ..."""
    watch, windows = RewardWatch(), []
    for reward in rewards:
        num_good = round(consumed_per_step * reward)
        watch = watch.observe([1.0] * num_good + [0.0] * (consumed_per_step - num_good))
        windows.append(watch.last)
    known = {**dict.fromkeys(range(len(rewards)), "ok"), **dict(enumerate(levels))}
    return Metrics(
        steps=tuple(
            step_record(
                step=index + 1,
                reward_mean=reward,
                reward_window_mean=windows[index] and windows[index].value,
                reward_window_error=windows[index].error if windows[index] else 0.0,
                warning_level=known[index],
                consumed=consumed_per_step * (index + 1),
            )
            for index, reward in enumerate(rewards)
        ),
        evaluations=tuple(
            evaluation_record(step=10 * index, accuracy=accuracy, num_trajectories=512)
            for index, accuracy in enumerate(accuracies)
        ),
    )


def test_the_training_reward_is_judged_over_windows_of_ten_steps():
    # Windows end at steps 10 to 30; the first below half of 1.0 holds four ones and six zeros.
    found = run_collapse(metrics_of([1.0] * 10 + [0.0] * 20))
    assert (found.measure, found.fall.step, found.fall.value) == (Measure.REWARD, 16, 0.4)


def test_one_bad_batch_is_no_collapse():
    assert run_collapse(metrics_of([1.0] * 10 + [0.0] + [1.0] * 10)) is None


def test_fewer_steps_than_a_window_are_not_judged():
    assert run_collapse(metrics_of([1.0, 0.0, 0.0])) is None


LOW = ((0, 0.0625), (7, 0.0))


def test_the_chance_of_few_responses_is_no_collapse():
    few = [evaluation_record(step=at, accuracy=one, num_trajectories=16) for at, one in LOW]
    assert run_collapse(Metrics(steps=(), evaluations=tuple(few))) is None
    many = [replace(each, num_trajectories=512) for each in few]
    assert run_collapse(Metrics(steps=(), evaluations=tuple(many))).measure is Measure.ACCURACY


def test_a_small_batch_needs_a_deeper_fall_of_its_reward():
    # 1 of 8 in every second step is 0.0625 of 80: 3 sqrt(0.0625 * 0.9375 / 80) = 0.08. The mean of
    # 10 steps of 128 responses, 0.0625 too, has 0.02.
    rewards = [0.125, 0.0] * 5 + [0.0] * 10
    assert run_collapse(metrics_of(rewards, consumed_per_step=8)) is None
    assert run_collapse(metrics_of(rewards, consumed_per_step=128)).measure is Measure.REWARD


def test_a_collapse_that_lasts_comes_before_one_that_was_overcome():
    found = run_collapse(metrics_of([1.0] * 10 + [0.0] * 10 + [1.0] * 10, [0.1, 0.9, 0.2]))
    assert (found.measure, found.fall.has_recovered) == (Measure.ACCURACY, False)


def test_the_notice_says_what_fell_when_it_was_warned_of_and_what_to_do():
    metrics = metrics_of([0.5] * 20, [0.3, 0.8, 0.1], ["ok"] * 3 + ["critical", "dead"])
    assert collapse_notice(metrics) == (
        "The run collapsed: the accuracy on held-out prompts fell from 0.8 at step 10 to 0.1 at"
        " step 20, and ends at 0.1. The early warning was critical from step 4. Cure: a smaller"
        " optimizer.learningRate or algorithm.maxPolicyLagSteps, from a checkpoint before the"
        " collapse."
    )


def test_the_notice_of_a_run_that_recovered_has_no_cure():
    assert collapse_notice(metrics_of([0.5] * 20, [0.8, 0.1, 0.7])) == (
        "The accuracy on held-out prompts collapsed from 0.8 at step 0 to 0.1 at step 10, and"
        " recovered: it ends at 0.7. The early warning never was critical."
    )


def test_only_a_collapse_that_lasts_is_the_state_in_which_a_run_ends():
    collapsed = metrics_of([0.5] * 20, [0.8, 0.1])
    assert lasting_collapse_notice(collapsed) == collapse_notice(collapsed)
    assert lasting_collapse_notice(metrics_of([0.5] * 20, [0.8, 0.1, 0.7])) is None
    assert lasting_collapse_notice(metrics_of([0.5] * 20, [0.3, 0.8])) is None


def test_a_model_that_no_step_changed_has_not_collapsed():
    metrics = metrics_of([0.5] * 20, [0.8, 0.1])
    steps = tuple(replace(step, skipped="no_gradient") for step in metrics.steps)
    assert lasting_collapse_notice(replace(metrics, steps=steps)) is None


def test_a_run_that_keeps_its_reward_has_no_notice():
    assert collapse_notice(metrics_of([0.2, 0.9] * 20, [0.3, 0.8])) is None


def test_a_warning_that_is_critical_at_the_end_is_noticed():
    levels = ["ok", "critical", "ok", "critical"]
    assert critical_at_end_notice(metrics_of([0.5] * 4, levels=levels).steps) == (
        "The early warning is critical at the last step (score 0.00); it was first critical at"
        " step 2."
    )


def test_a_warning_that_is_over_is_not():
    assert critical_at_end_notice(metrics_of([0.5] * 2, levels=["dead", "ok"]).steps) is None
    assert critical_at_end_notice(()) is None
