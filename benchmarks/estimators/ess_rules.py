"""Measure how well each kind of ESS detects a stale batch, and the scale that it gives, by length.

Token log ratios are drawn, not trained: N(-s2/2, s2) for the mismatch of the engines, and staleness
that adds a variance v per token. Staleness is either independent for every token, or persistent:
equal over stretches of 64 tokens, with the same variance of long sums. Every number is over batches
of 64 trajectories. Two small experiments follow: how much of the on-policy learning rate a dead
band gives back, and what one bad gradient costs AdamW when its step is damped or refused.

    python -m benchmarks.estimators.ess_rules

`auc` is the probability that a stale batch reads lower than a fresh one; 0.5 detects nothing. The
last line printed is JSON.
"""

import argparse
import json
import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.unit import EssKind, EssUnit, ess_reading, ess_unit
from vcpo.algo.ess.verdict import StepLimits, judge_step

TRAJECTORIES = 64
LENGTHS = (16, 256, 2048, 8192)
MISMATCHES = (0.0, 6.5e-4)
DRIFTS = {"small": 1.6e-4, "large": 2.6e-3}
"""Variance per token that staleness adds, nats^2: a quarter of the mismatch of bf16, and four."""
STRETCH_TOKENS = 64
KINDS = (EssKind.SEQUENCE, EssKind.BLOCK, EssKind.TOKEN, EssKind.AUTO)
DEAD_BANDS = (0.0, 0.25, 0.5)
WINDOW_BATCHES = 8
"""Batches whose weights are pooled, as an alternative to the kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The distribution of a batch's token log ratios."""

    num_tokens: int
    mismatch: float
    drift: float = 0.0
    is_persistent: bool = False

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw [TRAJECTORIES, num_tokens] log ratios, nats."""
        shape = (TRAJECTORIES, self.num_tokens)
        noise = torch.randn(shape, generator=generator) * math.sqrt(self.mismatch)
        stretch = min(STRETCH_TOKENS, self.num_tokens) if self.is_persistent else 1
        steps = torch.randn((TRAJECTORIES, self.num_tokens // stretch), generator=generator)
        moved = steps.repeat_interleave(stretch, dim=1) * math.sqrt(self.drift / stretch)
        return noise + moved - (self.mismatch + self.drift) / 2


def moments(log_ratios: torch.Tensor, unit: EssUnit) -> WeightMoments:
    """Return the moments of the blocks' weights; all trajectories have equal blocks."""
    ends = torch.tensor(unit.blocks[0]).cumsum(0) - 1
    sums = log_ratios.double().cumsum(1)[:, ends]
    log_weights = sums.diff(dim=1, prepend=torch.zeros(len(sums), 1, dtype=sums.dtype)).flatten()
    return WeightMoments(
        count=len(log_weights),
        log_sum=float(log_weights.logsumexp(0)),
        log_sum_squares=float((2 * log_weights).logsumexp(0)),
    )


def readings(law: Law, batches: int, seed: int) -> dict[str, list[float]]:
    """Return the uncapped relative ESS of every batch by kind; windows do not overlap."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [law.num_tokens] * TRAJECTORIES
    units = {kind: ess_unit(kind, lengths, law.mismatch) for kind in KINDS}
    found: dict[str, list[float]] = {name: [] for name in [*units, "window"]}
    window: list[WeightMoments] = []
    for _ in range(batches):
        log_ratios = law.draw(generator)
        for kind, unit in units.items():
            reading = ess_reading(unit, moments(log_ratios, unit))
            found[kind].append(reading.ess_ratio / reading.on_policy_ess_ratio)
        whole = units[EssKind.SEQUENCE]
        window.append(moments(log_ratios, whole))
        if len(window) == WINDOW_BATCHES:
            pooled = WeightMoments.merge(window).ess_ratio
            floor = 1 / (TRAJECTORIES * WINDOW_BATCHES)
            found["window"].append(pooled / max(math.exp(-law.mismatch * law.num_tokens), floor))
            window.clear()
    return found


def auc(stale: list[float], fresh: list[float]) -> float:
    """Return the probability that a stale reading is lower than a fresh one; ties count half."""
    below = sum((low < high) + 0.5 * (low == high) for low in stale for high in fresh)
    return below / (len(stale) * len(fresh))


def scale(relative: list[float]) -> float:
    """Return the median factor on the learning rate, by the square root."""
    return median(math.sqrt(min(1.0, each)) for each in relative)


def kinds_table(batches: int) -> list[dict[str, Any]]:
    """Return one row for each length, mismatch and staleness."""
    rows = []
    for num_tokens in LENGTHS:
        for mismatch in MISMATCHES:
            fresh = readings(Law(num_tokens=num_tokens, mismatch=mismatch), batches, seed=1)
            rows.append(_row(num_tokens, mismatch, "none", fresh, fresh))
            for name, drift in DRIFTS.items():
                for persistent in (False, True):
                    law = Law(
                        num_tokens=num_tokens,
                        mismatch=mismatch,
                        drift=drift,
                        is_persistent=persistent,
                    )
                    label = f"{name}, {'persistent' if persistent else 'per token'}"
                    stale = readings(law, batches, seed=2)
                    rows.append(_row(num_tokens, mismatch, label, stale, fresh))
    return rows


def _row(
    num_tokens: int,
    mismatch: float,
    drift: str,
    stale: dict[str, list[float]],
    fresh: dict[str, list[float]],
) -> dict[str, Any]:
    return {
        "tokens": num_tokens,
        "mismatch": mismatch,
        "drift": drift,
        "auc": {name: round(auc(stale[name], fresh[name]), 2) for name in stale},
        "scale": {name: round(scale(stale[name]), 3) for name in stale},
    }


def dead_band_table(batches: int) -> dict[str, dict[str, float]]:
    """Return the mean scale of AUTO on policy, and on a batch four times as far, by band."""
    table = {}
    for num_tokens in (600, 2048, 8192):
        fresh = readings(Law(num_tokens=num_tokens, mismatch=6.5e-4), batches, seed=3)
        stale = readings(Law(num_tokens=num_tokens, mismatch=6.5e-4, drift=2e-3), batches, seed=4)
        for band in DEAD_BANDS:
            table[f"{num_tokens} tokens, band {band:g}"] = {
                "fresh": round(_mean_scale(fresh[EssKind.AUTO], band), 3),
                "stale": round(_mean_scale(stale[EssKind.AUTO], band), 3),
            }
    return table


def _mean_scale(relative: list[float], band: float) -> float:
    limits = StepLimits(dead_band=band)
    return fmean(judge_step(min(1.0, each), 1.0, limits).scale for each in relative)


def lost_steps(outlier: float, damping: float | None, horizon: int = 200) -> float:
    """Return how many steps AdamW loses by one gradient of -outlier among gradients of 1.

    damping: factor on the learning rate of that step; None when it is refused.
    """
    beta1, beta2 = 0.9, 0.95
    first, second, progress = 1.0, 1.0, 0.0
    for step in range(horizon):
        is_outlier = step == 0
        if is_outlier and damping is None:
            continue
        gradient = -outlier if is_outlier else 1.0
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        rate = damping if is_outlier and damping is not None else 1.0
        progress += rate * first / math.sqrt(second)
    return horizon - progress


def main() -> None:
    """Print the three tables and the JSON."""
    parser = argparse.ArgumentParser(
        description="Compare kinds of ESS by length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batches", type=int, default=60, help="of each case")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = kinds_table(arguments.batches)
    for row in rows:
        pairs = [f"{name} {row['auc'][name]:.2f}/{row['scale'][name]:.2f}" for name in row["auc"]]
        print(f"L {row['tokens']:>4}  s2 {row['mismatch']:<7g} {row['drift']:<18}", *pairs)
    bands = dead_band_table(arguments.batches)
    for name, means in bands.items():
        print(f"{name}: mean scale {means['fresh']:.3f} fresh, {means['stale']:.3f} stale")
    lost = {
        f"outlier {size}": {
            "damped": round(lost_steps(size, 1 / math.sqrt(TRAJECTORIES)), 1),
            "refused": round(lost_steps(size, None), 1),
        }
        for size in (10, 100)
    }
    for name, steps in lost.items():
        print(f"{name}: {steps['damped']} steps lost when damped, {steps['refused']} when refused")
    print(json.dumps({"kinds": rows, "dead_band": bands, "lost_steps": lost}))


if __name__ == "__main__":
    main()
