"""Measure which baseline gives the least policy gradient variance, and whether it is OPOB.

The tiny model is trained with the learner's update, keeping all versions. The last one is then held
fixed, and groups of one prompt each are sampled with versions k steps older. Each group gives one
estimate of the gradient per baseline, all from the same trajectories (`group_gradients`). Two extra
rows take b* from trajectories that it is not subtracted from: `opobOfOthers` from the others of the
group, `opobOfOtherGroups` from the other groups of a block, one b for different prompts.

It measures the trace of the covariance of the estimate over groups, prompts included:

    raw            as the estimators come. A baseline that contains the trajectory's own reward
                   shrinks the mean gradient, a group mean by (n - 1) / n, and its noise likewise:
                   that is a shorter step, not one with less noise.
    at equal mean  divided by s^2, where s is the length of the mean gradient along that without
                   baseline, E[R h], in units of it; a baseline should not change it.

The second decides, because a learning rate compensates a factor. Intervals of 95 % are from a
jackknife that leaves out one block of groups, for all baselines at once: what they share cancels
in a ratio. Which rival is the next best is chosen once, on all groups.

    python -m benchmarks.estimators.gradient_variance

The last line printed is JSON; in it, ratios are OPOB's trace over a rival's, at the worst lag:

    ratio_vs_next_best      at equal mean, over the lowest of none, group mean and RLOO; OPOB is
                            lowest when this is below the bar of 1
    ratio_vs_group_mean     at equal mean, over group mean and RLOO, which are one there; like
                            OPOB, and unlike none, they are blind to a shift of all rewards
    ratio_vs_raw_next_best  of raw traces

`optimal_baseline` is b* of all trajectories of a lag together. Where it is far from their mean
reward, a group mean is a bad estimate of it. The exit status is always 0.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.covariance_traces import (
    BLOCKS,
    Array,
    Moments,
    Ratio,
    jackknife,
    moments,
    traces,
)
from benchmarks.harness.group_gradients import (
    NAMES,
    OPOB,
    OPOB_OF_OTHER_GROUPS,
    OPOB_OF_OTHERS,
    RIVALS,
    GroupGradients,
    with_other_baselines,
)
from benchmarks.harness.laboratory import Laboratory
from vcpo.algo import Baseline, ess_ratio, optimal_baseline
from vcpo.wire.trajectory import Trajectory

STUDY = Path(__file__).resolve().parents[2] / "examples" / "study.yaml"
BAR = 1.0
REFERENCE = NAMES.index(Baseline.NONE.value)
SUBJECTS = (OPOB, OPOB_OF_OTHERS, OPOB_OF_OTHER_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """The numbers of all trajectories of a lag; groups are added one by one."""

    rewards: list[float] = field(default_factory=list)
    squared_norms: list[float] = field(default_factory=list)
    log_weights: list[float] = field(default_factory=list)

    def add(self, group: GroupGradients) -> None:
        """Add a group."""
        self.rewards.extend(group.rewards)
        self.squared_norms.extend(group.squared_norms)
        self.log_weights.extend(group.log_weights)


def estimates(
    laboratory: Laboratory, groups: Sequence[Sequence[Trajectory]], seen: Seen
) -> Iterator[npt.NDArray[np.float32]]:
    """Estimates of one block after another, [groups of the block, E, parameters].

    groups: a multiple of BLOCKS, each block of two or more.
    """
    size = len(groups) // BLOCKS
    for start in range(0, len(groups), size):
        block = [laboratory.gradients(group) for group in groups[start : start + size]]
        for each in block:
            seen.add(each)
        yield with_other_baselines(block).numpy()


def figures_of(lag: int, laboratory: Laboratory, num_groups: int) -> dict[str, Any]:
    """Return the figures of one lag."""
    seen = Seen()
    measured = moments(estimates(laboratory, laboratory.sample_new(lag, num_groups), seen))
    found = traces(measured, range(BLOCKS), REFERENCE)
    return {
        "lag": lag,
        "ess_ratio": _round(ess_ratio(seen.log_weights)),
        "reward_mean": _round(fmean(seen.rewards)),
        "optimal_baseline": _round(optimal_baseline(seen.rewards, seen.squared_norms)),
        "trace_raw": _by_name(found.raw),
        "mean_scale": _by_name(found.mean_scale),
        "trace_at_equal_mean": _by_name(found.at_equal_mean),
        "versus": {name: _versus(measured, name) for name in SUBJECTS},
    }


def versus_next_best(
    measured: Moments, name: str, rivals: Sequence[str] = RIVALS, *, is_raw: bool = False
) -> tuple[str, Ratio]:
    """Return the rival with the lowest trace, and the ratio of an estimator's trace to it."""

    def by_name(blocks: Sequence[int]) -> dict[str, float]:
        found = traces(measured, blocks, REFERENCE)
        values = found.raw if is_raw else found.at_equal_mean
        return dict(zip(NAMES, values.tolist(), strict=True))

    everything = by_name(range(BLOCKS))
    rival = min(rivals, key=lambda each: everything[each])

    def ratio(blocks: Sequence[int]) -> float:
        values = by_name(blocks)
        return values[name] / values[rival]

    return rival, jackknife(ratio)


def _versus(measured: Moments, name: str) -> dict[str, Any]:
    group_mean = (Baseline.GROUP_MEAN.value,)
    return {
        "next_best": _document(versus_next_best(measured, name)),
        "group_mean": _document(versus_next_best(measured, name, group_mean)),
        "raw_next_best": _document(versus_next_best(measured, name, is_raw=True)),
    }


def _document(versus: tuple[str, Ratio]) -> dict[str, Any]:
    rival, ratio = versus
    interval = [_round(ratio.low), _round(ratio.high)]
    return {"rival": rival, "ratio": _round(ratio.value), "interval_95": interval}


def _by_name(values: Array) -> dict[str, float]:
    return dict(zip(NAMES, map(_round, values.tolist()), strict=True))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def print_figures(figures: dict[str, Any]) -> None:
    """Print a table of one lag."""
    print(
        f"lag {figures['lag']}: ESS ratio {figures['ess_ratio']:.3f}, mean reward "
        f"{figures['reward_mean']:.3f}, b* of all {figures['optimal_baseline']:.3f}"
    )
    print(f"  {'':<18} {'raw':>9} {'s':>7} {'equal mean':>11}   of the next best (95 %)")
    for name in NAMES:
        row = f"  {name:<18} {figures['trace_raw'][name]:>9.3g} {figures['mean_scale'][name]:>7.3f}"
        row += f" {figures['trace_at_equal_mean'][name]:>11.3g}"
        if name in SUBJECTS:
            versus = figures["versus"][name]["next_best"]
            low, high = versus["interval_95"]
            row += f"   {versus['ratio']:.2f} of {versus['rival']} ({low:.2f} to {high:.2f})"
        print(row, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.estimators.gradient_variance", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--study", type=Path, default=STUDY, help="whose model, task and batch")
    parser.add_argument("--steps", type=int, default=128, help="trained before measuring")
    parser.add_argument("--training-lag", type=int, default=8, help="age of the trained batches")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of the training")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 8, 32, 128])
    parser.add_argument("--groups", type=int, default=384, help=f"per lag, a multiple of {BLOCKS}")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling")
    options = parser.parse_args()
    if options.groups % BLOCKS or options.groups < 2 * BLOCKS:
        parser.error(f"--groups is {options.groups}: give {2 * BLOCKS} or more, by {BLOCKS}s")
    if not all(0 <= lag <= options.steps for lag in options.lags):
        parser.error(f"--lags is {options.lags}: give ages from 0 to --steps {options.steps}")
    return options


def main() -> None:
    """Train, measure every lag, and print the figures."""
    options = parse_arguments()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    laboratory = Laboratory(
        options.study,
        lag=options.training_lag,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    laboratory.train(options.steps)
    by_lag = []
    for lag in options.lags:
        by_lag.append(figures_of(lag, laboratory, options.groups))
        print_figures(by_lag[-1])
    versus = [figures["versus"][OPOB] for figures in by_lag]
    worst = {rival: max(each[rival]["ratio"] for each in versus) for rival in versus[0]}
    result = {
        "benchmark": "gradient_variance",
        **{f"ratio_vs_{rival}": ratio for rival, ratio in worst.items()},
        "bar": BAR,
        "is_lowest": worst["next_best"] < BAR,
        "groups_per_lag": options.groups,
        "steps": options.steps,
        "training_lag": options.training_lag,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "by_lag": by_lag,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
