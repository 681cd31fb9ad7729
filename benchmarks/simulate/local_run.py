"""The model beside a real run of this machine, paced as `benchmarks.async_speedup` paces it.

Host, learner, workers, leases, weights over gRPC, sampling and learning are real. Pauses stand for
the decoding of long responses, for the gradient and for the publication. The model knows these
three times, the places and the lag limit, and nothing of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.async_speedup.comparison import seconds_per_step
from benchmarks.async_speedup.hardware import GROUP_SIZE, GROUPS, REFERENCE, Hardware
from benchmarks.async_speedup.trial import Setting, train
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.system import Generation, Step, System, Versions

HARDWARE: Final = replace(REFERENCE, publication_s=10.0)
SETTINGS: Final = (
    Setting(lag=1, workers=4, steps=64, seed=1),
    Setting(lag=4, workers=2, steps=64, seed=1),
)
"""One run that waits for the lag limit, and one that waits for its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a run, real or simulated, shows over all its steps."""

    seconds_per_step: float
    lag_mean: float
    """Mean over the steps of their tokens' mean, in policy versions."""
    dropped_ratio: float
    """Trajectories that were too old, over those that were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A real run and the mean of simulated ones."""

    setting: Setting
    real: Course
    simulated: Course

    @property
    def throughput_error(self) -> float:
        """Relative error of the simulated steps per second."""
        return abs(self.real.seconds_per_step / self.simulated.seconds_per_step - 1.0)

    @property
    def lag_error(self) -> float:
        """Relative error of the simulated mean lag."""
        return abs(self.simulated.lag_mean / self.real.lag_mean - 1.0)

    def line(self) -> str:
        """Return the comparison as one line of text."""
        real, simulated = self.real, self.simulated
        return (
            f"k = {self.setting.lag}, {self.setting.workers} workers:"
            f" {real.seconds_per_step:.3f} s a step, simulated {simulated.seconds_per_step:.3f};"
            f" mean lag {real.lag_mean:.2f}, simulated {simulated.lag_mean:.2f};"
            f" dropped {real.dropped_ratio:.0%}, simulated {simulated.dropped_ratio:.0%}"
        )

    def rounded(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "workers": self.setting.workers,
            "max_policy_lag_steps": self.setting.lag,
            "throughput_error": round(self.throughput_error, 4),
            "lag_error": round(self.lag_error, 4),
        }


def compare(setting: Setting, hardware: Hardware, folder: Path) -> Comparison:
    """Run and simulate a setting.

    Raises: TrialFailedError as `train`.
    """
    _, metrics = train(setting, hardware, folder)
    last = metrics.steps[-1]
    real = Course(
        seconds_per_step=seconds_per_step(metrics),
        lag_mean=fmean(step.lag_mean for step in metrics.steps),
        dropped_ratio=sum(last.dropped.values()) / last.consumed,
    )
    return Comparison(setting=setting, real=real, simulated=simulated_course(setting, hardware))


def simulated_course(setting: Setting, hardware: Hardware, *, num_runs: int = 32) -> Course:
    """Return the mean of simulated runs that differ in their lengths."""
    system = paced_system(setting, hardware)
    courses = [_course(system, setting.steps, seed) for seed in range(num_runs)]
    return Course(
        seconds_per_step=fmean(one.seconds_per_step for one in courses),
        lag_mean=fmean(one.lag_mean for one in courses),
        dropped_ratio=fmean(one.dropped_ratio for one in courses),
    )


def paced_system(setting: Setting, hardware: Hardware) -> System:
    """Return what the pauses make of this machine.

    A paced response is sampled at once and then held back, so all its tokens have the version of
    its lease.
    """
    return System(
        workers=setting.workers,
        generation=Generation(
            lengths=hardware.lengths,
            token_s=hardware.decoding_step_s,
            places=hardware.worker_groups * GROUP_SIZE,
            swaps_in_flight=False,
        ),
        prompts_per_step=GROUPS,
        group_size=GROUP_SIZE,
        max_policy_lag_steps=setting.lag,
        step=Step(constant_s=hardware.learner_step_s),
        versions=Versions(announced_s=hardware.publication_s),
    )


def _course(system: System, num_steps: int, seed: int) -> Course:
    steps = Simulation(system, seed=seed).run(num_steps)
    return Course(
        seconds_per_step=steps[-1].ended_s / num_steps,
        lag_mean=fmean(step.lag_mean for step in steps),
        dropped_ratio=steps[-1].dropped / (num_steps * system.batch_trajectories),
    )
