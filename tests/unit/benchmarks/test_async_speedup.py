"""Paces are kept, and journals are read without credit for what came later."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.async_speedup.__main__ import worst
from benchmarks.async_speedup.comparison import (
    Point,
    accuracy_course,
    final_accuracy,
    first_reach,
    row,
    summary,
)
from benchmarks.async_speedup.hardware import REFERENCE, Hardware
from benchmarks.async_speedup.paced_learner import lasting
from benchmarks.async_speedup.paced_task import PacedTask
from benchmarks.async_speedup.trial import Setting, Trial, make_run
from benchmarks.harness.timed_engine import Lengths
from tests.fixtures.records import evaluation_record, step_record
from vcpo.records.journal import Metrics
from vcpo_rollout.environments import Split

# All lengths are 10: the median is far beyond the longest.
TEN_TOKENS = Lengths(median=1e6, sigma=0.1, most=10)
HARDWARE = Hardware(lengths=TEN_TOKENS, decoding_step_s=0.1, learner_step_s=0.25, worker_groups=2)


class Clock:
    """Moved by whoever sleeps; `then` has a time and what happens at it."""

    def __init__(self, then: tuple[float, Callable[[], None]] | None = None) -> None:
        self.now_s = 100.0
        self._then = then

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        if self._then is not None and self.now_s >= self._then[0]:
            self._then[1]()


def make_task(folder: Path, clock: Clock, workers: int = 1) -> PacedTask:
    return PacedTask(
        seed=0,
        task="sort_digits",
        parameters={"digits": 5, "style": "plain"},
        lengths={"median": 1e6, "sigma": 0.1, "most": 10},
        decoding_step_s=0.1,
        workers_folder=str(folder),
        workers=workers,
        clock=clock,
        sleep=clock.sleep,
    )


def test_a_synchronous_step_waits_for_its_longest_response_and_then_for_the_learner():
    assert HARDWARE.synchronous_step_s() == pytest.approx(1.0 + 0.25)


@pytest.mark.parametrize(
    ("workers", "step_s"),
    [
        pytest.param(2, 1.0, id="four groups at a time: a batch in the time of a group"),
        pytest.param(4, 0.5, id="eight"),
        pytest.param(16, 0.25, id="more than the learner takes"),
    ],
)
def test_the_slower_side_sets_the_time_of_an_asynchronous_step(workers, step_s):
    assert HARDWARE.asynchronous_step_s(workers) == pytest.approx(step_s)


def test_two_workers_of_the_reference_are_too_few_for_its_learner_and_six_are_not():
    assert REFERENCE.asynchronous_step_s(2) == pytest.approx(34.0, abs=0.5)
    assert REFERENCE.asynchronous_step_s(6) == REFERENCE.learner_step_s == 25.0


def test_faster_hardware_is_faster_on_both_sides():
    half = REFERENCE.faster(2.0)
    assert half.synchronous_step_s() == pytest.approx(REFERENCE.synchronous_step_s() / 2)
    assert half.asynchronous_step_s(6) == pytest.approx(REFERENCE.asynchronous_step_s(6) / 2)


def test_a_group_is_judged_when_its_longest_response_would_end_and_not_before(tmp_path):
    clock = Clock()
    task = make_task(tmp_path, clock)
    prompt = task.prompt(Split.TRAIN, 3)
    assert task.reward(prompt, prompt.answer) == 1.0
    assert clock.now_s == pytest.approx(101.0)
    assert task.reward(prompt, "wrong") == 0.0
    assert clock.now_s == pytest.approx(101.0)


def test_the_first_held_out_prompts_wait_for_all_workers_and_none_takes_time(tmp_path):
    clock = Clock(then=(105.0, (tmp_path / "another-process").touch))
    task = make_task(tmp_path, clock, workers=2)
    prompt = task.prompt(Split.EVALUATION, 0)
    started_s = clock.now_s
    assert started_s == pytest.approx(105.0, abs=0.2)
    assert task.reward(prompt, prompt.answer) == 1.0
    task.prompt(Split.EVALUATION, 1)
    assert clock.now_s == started_s


@pytest.mark.parametrize(
    ("work_s", "ended_s"),
    [pytest.param(0.25, 102.0), pytest.param(3.0, 103.0, id="already longer")],
)
def test_paced_work_includes_the_time_that_it_really_takes(work_s, ended_s):
    clock = Clock()

    def work(value: int) -> int:
        clock.now_s += work_s
        return 2 * value

    assert lasting(2.0, work, clock=clock, sleep=clock.sleep)(21) == 42
    assert clock.now_s == pytest.approx(ended_s)


def test_the_runs_differ_in_lag_and_workers_only():
    setting = Setting(lag=8, workers=6, steps=5, seed=1)
    run = make_run(setting, HARDWARE, workers_folder=Path("folder"))
    (group,) = run.spec.rollouts
    assert run.spec.algorithm.max_policy_lag_steps == 8
    assert (group.min_replicas, group.max_replicas) == (6, 6)
    assert group.max_concurrent_sequences == 16
    assert run.spec.environment.parameters["workers"] == 6
    assert run.spec.evaluation.prompts == 6 * 16  # the last worker gets some too


def trial(lag: int, accuracies: Mapping[int, float], *, step_s: float = 2.0) -> Trial:
    """A run whose clock starts at 1000 s, and whose last checkpoint is of its last step."""
    setting = Setting(lag=lag, workers=2, steps=max(accuracies), seed=1)
    start = evaluation_record(step=0, time_unix_s=1000.0, accuracy=0.5)
    steps = tuple(
        step_record(
            step=step,
            time_unix_s=1000.0 + step * step_s,
            lag_mean=float(step),
            consumed=32 * step,
            dropped={"lag_exceeded": 8 * step},
        )
        for step in range(1, setting.steps + 1)
    )
    metrics = Metrics(steps=steps, evaluations=(start,))
    return Trial(setting=setting, metrics=metrics, accuracies=accuracies)


def test_an_accuracy_counts_at_the_time_when_its_step_ended():
    assert accuracy_course(trial(2, {4: 0.75, 0: 0.25, 2: 0.5})) == [
        Point(step=0, seconds=0.0, accuracy=0.25),
        Point(step=2, seconds=4.0, accuracy=0.5),
        Point(step=4, seconds=8.0, accuracy=0.75),
    ]


def test_the_target_is_reached_on_the_line_between_two_accuracies():
    course = accuracy_course(trial(0, {0: 0.2, 2: 0.6, 4: 0.8}))
    reached = first_reach(course, 0.7)
    assert reached is not None
    assert (reached.step, reached.seconds) == (pytest.approx(3.0), pytest.approx(6.0))
    assert first_reach(course, 0.1) == Point(step=0, seconds=0.0, accuracy=0.1)
    assert first_reach(course, 0.9) is None


def test_the_final_accuracy_is_the_mean_over_the_last_quarter_of_the_steps():
    accuracies = {0: 0.1, 8: 0.2, 24: 0.3, 28: 0.6, 32: 0.8}
    assert final_accuracy(trial(0, accuracies)) == pytest.approx(0.7)


SYNCHRONOUS = trial(0, {0: 0.2, 2: 0.76, 4: 0.8})  # target 0.95 * 0.8 after 2 steps, 4 s
STALE = trial(8, {0: 0.2, 2: 0.44, 4: 0.76}, step_s=0.5)  # after 4 steps, 2 s
NEVER = trial(8, {0: 0.2, 2: 0.3, 4: 0.4})


def test_a_run_that_steps_four_times_as_often_and_needs_twice_the_steps_is_twice_as_fast():
    found = row(STALE, SYNCHRONOUS, HARDWARE)
    assert found.steps_to_target == pytest.approx(4.0)
    assert found.seconds_to_target == pytest.approx(2.0)
    assert found.speedup == pytest.approx(2.0)
    assert found.step_speedup == pytest.approx(4.0)
    assert found.step_speedup_limit == pytest.approx(1.25)
    assert found.lag_mean == pytest.approx(2.5)
    assert found.dropped_ratio == pytest.approx(0.25)
    assert found.final_accuracy == pytest.approx(0.76)


def test_a_line_tells_a_target_that_was_reached_from_one_that_was_not():
    reached, not_reached = (row(each, SYNCHRONOUS, HARDWARE).line() for each in (STALE, NEVER))
    assert "0.50 s a step (x4.00, at most x1.25), target after 4.0 steps, 2 s (x2.00)" in reached
    assert "target not reached" in not_reached


def test_the_last_line_has_the_worst_over_the_numbers_of_workers():
    two = summary([row(each, SYNCHRONOUS, HARDWARE) for each in (SYNCHRONOUS, STALE)])
    six = summary([row(each, SYNCHRONOUS, HARDWARE) for each in (SYNCHRONOUS, NEVER)])
    assert (two["speedup_k8"], two["accuracy_gap"]) == (2.0, 0.04)
    assert (six["speedup_k8"], six["accuracy_gap"]) == (None, 0.4)
    both = worst({"2": two, "6": six}, [8])
    assert (both["speedup_k8"], both["accuracy_gap"]) == (None, 0.4)
    assert both["workers"]["2"]["runs"]["k8"]["steps_to_target"] == 4.0
    assert worst({"2": two}, [8])["speedup_k8"] == 2.0
