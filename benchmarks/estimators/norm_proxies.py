"""Measure how good cheap proxies of gradient norms are, and their effect on a baseline.

The tiny model is trained on each task with the learner's update, keeping all versions. Groups are
then sampled with versions k steps older than the last one, and every trajectory's squared norm is
measured exactly and by each proxy of `algorithm.gradientNorms`.

    pearson_log   correlation of the logs of the squared norms, over all trajectories
    rank          Spearman's correlation of the same
    own_...       both with the importance weights divided out, which proxies and norms share
    baseline      mean over groups of |b - b*|, with b the optimal baseline as the proxy finds it
                  and b* as the norms do; groups whose rewards are all equal are left out

`none` gives all trajectories equal weight, so its b is the group's mean. A proxy that is constant
has no correlation: null. `opob_overhead` measures what exact norms cost in a step.

    python -m benchmarks.estimators.norm_proxies

The last line printed is JSON; about a minute of CPU.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.laboratory import WEIGHT_CAP, Laboratory
from vcpo.algo.baseline import GradientNormEstimator, optimal_baseline
from vcpo.algo.ess.importance_weights import ess_ratio, truncated_weight
from vcpo.wire.trajectory import Trajectory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASKS = {"sort_digits": None, "countdown": EXAMPLES / "countdown.yaml"}
"""By name, the run that the task is taken from; None is the study's own."""
EXACT = GradientNormEstimator.EXACT.value
NONE = "none"
PROXIES = tuple(each.value for each in GradientNormEstimator if each.value != EXACT)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredGroup:
    """The norms, proxies and rewards of one group's trajectories."""

    rewards: Sequence[float]
    log_weights: Sequence[float]
    """Nats, untruncated."""
    squared_norms: Mapping[str, Sequence[float]]
    """By estimator."""


def measure_group(laboratory: Laboratory, group: Sequence[Trajectory]) -> MeasuredGroup:
    """Measure one group by every estimator."""
    return MeasuredGroup(
        rewards=[trajectory.reward for trajectory in group],
        log_weights=laboratory.log_weights(group),
        squared_norms={
            each.value: laboratory.squared_norms(group, each) for each in GradientNormEstimator
        },
    )


def correlations(first: Array, second: Array) -> dict[str, float | None]:
    """Return the correlations of two estimates of positive numbers."""
    return {
        "pearson_log": pearson(np.log(first), np.log(second)),
        "rank": pearson(ranks(first), ranks(second)),
    }


def pearson(first: Array, second: Array) -> float | None:
    """Return Pearson's correlation; None when one side is constant up to rounding."""
    if any(np.ptp(each) <= 1e-9 * max(1.0, float(np.abs(each).max())) for each in (first, second)):
        return None
    return _round(float(np.corrcoef(first, second)[0, 1]))


def ranks(values: Array) -> Array:
    """Return ranks from 1; equal values get the mean of their ranks."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: Array = (last - (counts - 1) / 2.0)[positions]
    return means


def baseline_difference(groups: Sequence[MeasuredGroup], name: str) -> float | None:
    """Return the mean |b - b*| of a proxy's baseline; None without groups."""
    differences = [
        abs(_baseline(group, name) - _baseline(group, EXACT))
        for group in groups
        if len(set(group.rewards)) > 1
    ]
    return _round(fmean(differences)) if differences else None


def figures_of_proxy(groups: Sequence[MeasuredGroup], name: str) -> dict[str, Any]:
    """Compare one proxy with the norms, over trajectories whose norm is not 0."""
    exact, proxy = (_flat(group.squared_norms[each] for group in groups) for each in (EXACT, name))
    logs = _flat(group.log_weights for group in groups).tolist()
    shared = np.array([truncated_weight(each, WEIGHT_CAP) for each in logs]) ** 2
    seen = (exact > 0.0) & (proxy > 0.0)
    own = correlations((exact / shared)[seen], (proxy / shared)[seen])
    return {
        **correlations(exact[seen], proxy[seen]),
        **{f"own_{kind}": value for kind, value in own.items()},
        "baseline": baseline_difference(groups, name),
    }


def figures_of(groups: Sequence[MeasuredGroup], lag: int) -> dict[str, Any]:
    """Return the figures of one lag."""
    exact = _flat(group.squared_norms[EXACT] for group in groups)
    return {
        "lag": lag,
        "ess_ratio": _round(ess_ratio(_flat(group.log_weights for group in groups).tolist())),
        "reward_mean": _round(fmean(_flat(group.rewards for group in groups).tolist())),
        "log_norm_deviation": _round(float(np.std(np.log(exact[exact > 0.0])))),
        "informative_groups": sum(len(set(group.rewards)) > 1 for group in groups),
        "proxies": {name: figures_of_proxy(groups, name) for name in PROXIES},
        "group_mean": {"baseline": baseline_difference(groups, NONE)},
    }


def _baseline(group: MeasuredGroup, name: str) -> float:
    norms = [1.0] * len(group.rewards) if name == NONE else group.squared_norms[name]
    return optimal_baseline(group.rewards, norms)


def _flat(rows: Any) -> Array:
    return np.array([value for row in rows for value in row], dtype=np.float64)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def print_figures(task: str, figures: Mapping[str, Any]) -> None:
    """Print a table of one lag."""
    print(
        f"{task}, lag {figures['lag']}: ESS ratio {figures['ess_ratio']:.3f}, mean reward "
        f"{figures['reward_mean']:.3f}, {figures['informative_groups']} informative groups"
    )
    print("                log r    rank   own log r   own rank   |b - b*|")
    for name, row in figures["proxies"].items():
        cells = [row[key] for key in ("pearson_log", "rank", "own_pearson_log", "own_rank")]
        text = "  ".join("    --" if cell is None else f"{cell:6.3f}" for cell in cells)
        print(f"  {name:<12} {text}   {row['baseline']}")
    print(f"  {'group mean':<12} {'':<30}   {figures['group_mean']['baseline']}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.estimators.norm_proxies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--study", type=Path, default=EXAMPLES / "study.yaml", help="whose batch")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=48, help="trained before measuring")
    parser.add_argument("--training-lag", type=int, default=4, help="age of the trained batches")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the training")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 48])
    parser.add_argument("--groups", type=int, default=64, help="sampled for each lag")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling")
    options = parser.parse_args()
    if not all(0 <= lag <= options.steps for lag in options.lags):
        parser.error(f"--lags is {options.lags}: give ages from 0 to --steps {options.steps}")
    return options


def figures_of_task(task: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on one task and measure every lag."""
    laboratory = Laboratory(
        options.study,
        lag=options.training_lag,
        learning_rate=options.learning_rate,
        seed=options.seed,
        task_file=TASKS[task],
    )
    laboratory.train(options.steps)
    by_lag = []
    for lag in options.lags:
        groups = laboratory.sample_new(lag, options.groups)
        by_lag.append(figures_of([measure_group(laboratory, group) for group in groups], lag))
        print_figures(task, by_lag[-1])
    return by_lag


def main() -> None:
    """Measure every task and print the figures."""
    options = parse_arguments()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    result = {
        "benchmark": "norm_proxies",
        "groups_per_lag": options.groups,
        "steps": options.steps,
        "training_lag": options.training_lag,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "tasks": {task: figures_of_task(task, options) for task in options.tasks},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
