"""Measure what the trust region reads where the truth is known: by batch size, and after a drift.

Batch size. Weights are log-normal with mean 1, so that the ESS ratio of an infinite batch is known:
the target of the region. `missed` is the mean over many batches of the nats that B weights miss,
over the truth; it is too little where B is small, because most batches lack the rare large weight.
`read` is what the region reads of that mean: what batches of 64 would miss, which is the size that
its target was chosen on.

Drift. A run whose drift per distance is four times as large for its first 100 steps, and then
constant, without noise, with the base rate far above the edge. `recovery_steps` counts the steps
from the end of the large drift until the rate is back at 0.9 of the edge; null if the run ends
before.

    python -m benchmarks.estimators.region_rule

The last line printed is JSON: `batch_size_invariance` is the largest relative error of what a size
reads, against what 64 weights miss, and `as_missed` the same without the region's correction.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from vcpo.algo.ess.finite_batch import nats_at_size
from vcpo.algo.ess.trust_region import TARGET_BATCH, TARGET_ESS_RATIO, TrustRegion

SIZES = (8, 16, 64, 256, 2048)
DRAWS = 1 << 19
"""Weights drawn for each size."""
HORIZON_STEPS = 32
EARLY_STEPS, EARLY_DRIFT = 100, 4.0
"""Steps of a large drift at the start, and how many times as large it is."""
BASE_RATE = 10.0
"""Over the rate at which data of the horizon reaches the target."""


def missing_nats(size: int, variance: float, generator: torch.Generator) -> float:
    """Return the mean over batches of -log of the ESS ratio, nats."""
    shape = (DRAWS // size, size)
    log_weights = torch.randn(shape, generator=generator, dtype=torch.float64) * math.sqrt(variance)
    log_ratio = 2 * log_weights.logsumexp(1) - (2 * log_weights).logsumexp(1) - math.log(size)
    return -float(log_ratio.mean())


def rates_after_drift(steps: int) -> list[float]:
    """Return the rates of a run over the rate of the edge."""
    edge_nats = -math.log(TARGET_ESS_RATIO)
    region, rates = TrustRegion(horizon_steps=HORIZON_STEPS), list[float]()
    for step in range(steps):
        newest = rates[-HORIZON_STEPS:]
        distance = math.sqrt(sum(rate * rate for rate in newest))
        drift = edge_nats / math.sqrt(HORIZON_STEPS) * (EARLY_DRIFT if step < EARLY_STEPS else 1)
        region = region.observe(drift * distance, {len(newest): 1})
        allowed = region.largest_rate(BASE_RATE)
        region = region.step(allowed, allowed)
        rates.append(allowed)
    return rates


def recovery_steps(rates: Sequence[float]) -> int | None:
    """Return the steps from the end of the drift until the rate is back; None if it never is."""
    later = rates[EARLY_STEPS:]
    return next((step for step, rate in enumerate(later) if rate >= 0.9), None)


def by_size() -> Mapping[int, Mapping[str, float]]:
    """Return by size what its batches miss, and what the region reads of it; over the truth."""
    generator = torch.Generator().manual_seed(0)
    variance = -math.log(TARGET_ESS_RATIO)
    missed = {size: missing_nats(size, variance, generator) for size in SIZES}
    return {
        size: {
            "missed": nats / variance,
            "read": nats_at_size(nats, size, TARGET_BATCH) / variance,
        }
        for size, nats in missed.items()
    }


def largest_error(sizes: Mapping[int, Mapping[str, float]], name: str) -> float:
    """Return the largest relative error of a size's number against that of `TARGET_BATCH`."""
    whole = sizes[TARGET_BATCH][name]
    return round(max(abs(found[name] / whole - 1.0) for found in sizes.values()), 3)


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of the run with a drift [20000]")
    arguments = parser.parse_args()
    sizes, rates = by_size(), rates_after_drift(arguments.steps)
    for size, found in sizes.items():
        print(f"B = {size:5}: misses {found['missed']:.3f}, read as {found['read']:.3f}")
    shown = [step for step in (400, 2_000, 5_000, 10_000) if step < len(rates)]
    print("rate over the edge:", {step: round(rates[step], 2) for step in shown})
    record: dict[str, Any] = {
        "benchmark": "region_rule",
        "batch_size_invariance": largest_error(sizes, "read"),
        "as_missed": largest_error(sizes, "missed"),
        "recovery_steps_after_drift": recovery_steps(rates),
        "early_rate": fmean(rates[EARLY_STEPS - 10 : EARLY_STEPS]),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
