"""Asynchronous runs beside the synchronous one: what their journals say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from benchmarks.async_speedup.hardware import Hardware
from benchmarks.async_speedup.trial import Trial
from vcpo.records.journal import Metrics

TARGET_SHARE: Final = 0.95
"""The target is this share of the synchronous run's final accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The accuracy of a run at some time."""

    step: float
    seconds: float
    """Since the end of the evaluation before the first step."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one run; None where the run never reached the target."""

    lag: int
    seconds_per_step: float
    steps_to_target: float | None
    seconds_to_target: float | None
    speedup: float | None
    """Seconds to the target of the synchronous run over those of this one."""
    step_speedup: float
    """The same of seconds per step."""
    step_speedup_limit: float
    """The most that the hardware allows an asynchronous run, of any lag."""
    lag_mean: float
    dropped_ratio: float
    """Trajectories that were dropped as too old, over those that were trained on."""
    final_accuracy: float
    """Mean over the last quarter of the steps."""

    def line(self) -> str:
        """Return the figures as one line of text."""
        target = "target not reached"
        if self.speedup is not None:
            target = (
                f"target after {self.steps_to_target:.1f} steps, {self.seconds_to_target:.0f} s"
                f" (x{self.speedup:.2f})"
            )
        return (
            f"k = {self.lag}: {self.seconds_per_step:.2f} s a step (x{self.step_speedup:.2f}, at"
            f" most x{self.step_speedup_limit:.2f}), {target}, accuracy {self.final_accuracy:.3f},"
            f" mean lag {self.lag_mean:.1f}, dropped {self.dropped_ratio:.0%}"
        )


def accuracy_course(trial: Trial) -> list[Point]:
    """Return the accuracies of a run in order of steps, each at the time when its step ended."""
    start_s = trial.metrics.evaluations[0].time_unix_s
    ended_s = {0: start_s} | {step.step: step.time_unix_s for step in trial.metrics.steps}
    return [
        Point(step=step, seconds=ended_s[step] - start_s, accuracy=accuracy)
        for step, accuracy in sorted(trial.accuracies.items())
    ]


def final_accuracy(trial: Trial) -> float:
    """Return the mean accuracy over the last quarter of the steps."""
    steps = trial.setting.steps
    return fmean(each for step, each in trial.accuracies.items() if step > 0.75 * steps)


def first_reach(course: Sequence[Point], accuracy: float) -> Point | None:
    """Return where the line through the accuracies first reaches an accuracy; None if nowhere."""
    before = course[0]
    for point in course:
        if point.accuracy >= accuracy:
            rise = point.accuracy - before.accuracy
            share = (accuracy - before.accuracy) / rise if rise > 0 else 1.0
            return Point(
                step=before.step + share * (point.step - before.step),
                seconds=before.seconds + share * (point.seconds - before.seconds),
                accuracy=accuracy,
            )
        before = point
    return None


def seconds_per_step(metrics: Metrics) -> float:
    """Return the mean time of a step, the wait for its batch included."""
    last = metrics.steps[-1]
    return (last.time_unix_s - metrics.evaluations[0].time_unix_s) / last.step


def row(trial: Trial, synchronous: Trial, hardware: Hardware) -> Row:
    """Return the figures of a run beside the synchronous one with as many workers."""
    target = TARGET_SHARE * final_accuracy(synchronous)
    own, other = (first_reach(accuracy_course(each), target) for each in (trial, synchronous))
    last = trial.metrics.steps[-1]
    step_s = seconds_per_step(trial.metrics)
    limit_s = hardware.asynchronous_step_s(trial.setting.workers)
    return Row(
        lag=trial.setting.lag,
        seconds_per_step=step_s,
        steps_to_target=own.step if own else None,
        seconds_to_target=own.seconds if own else None,
        speedup=other.seconds / own.seconds if own and other else None,
        step_speedup=seconds_per_step(synchronous.metrics) / step_s,
        step_speedup_limit=hardware.synchronous_step_s() / limit_s,
        lag_mean=fmean(step.lag_mean for step in trial.metrics.steps),
        dropped_ratio=sum(last.dropped.values()) / last.consumed,
        final_accuracy=final_accuracy(trial),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of one number of workers; the first row is the synchronous run."""
    synchronous, *others = rows
    gap = max(synchronous.final_accuracy - each.final_accuracy for each in others)
    runs = {f"k{row.lag}": {at: _rounded(each) for at, each in asdict(row).items()} for row in rows}
    speedups = {f"speedup_{name}": runs[name]["speedup"] for name in list(runs)[1:]}
    return {**speedups, "accuracy_gap": _rounded(gap), "runs": runs}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
