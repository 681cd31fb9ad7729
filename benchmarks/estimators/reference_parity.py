"""Compare `vcpo.algo` with a second derivation of the same numbers, on random batches.

The second derivation shares no formula with the first. It works in linear space and extended
precision on whole vectors, which is only safe for the moderate weights drawn here:

- a weight is the product of its tokens' probability ratios, not the exponential of a sum;
- the ESS ratio is 1 / (1 + cv^2), cv the coefficient of variation of the weights;
- the learning rate scale is the real root of x^2 = min(1, rho / rho_on);
- the trust region's target is a power of the geometric mean of the tokens' probabilities;
- the optimal baseline is the solution of the least squares problem min_b sum_i ||(R_i - b) h_i||^2,
  solved over every component of the weighted gradients h_i, which are never reduced to norms.
"""

import json
import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness.measures import parser_of
from vcpo.algo.baseline import optimal_baseline
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.algo.ess.trust_region import TrustRegion
from vcpo.algo.ess.verdict import learning_rate_scale
from vcpo.torch import truncated_weights

MAX_REL_ERROR = 1e-5
TRUNCATION = 8.0
GRADIENT_SIZE = 32

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's worth of random trajectories, [B] long in every field."""

    learner_logprobs: list[Array]
    """[L_i] nats, float32 as an engine reports them."""

    rollout_logprobs: list[Array]
    """[L_i] nats, float32."""

    rewards: Array
    """[B] in [0, 1)."""

    gradients: Array
    """[B, GRADIENT_SIZE] gradient of each trajectory's mean log probability."""

    on_policy_ess_ratio: float
    """In [0.3, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """The compared quantities."""

    ess_ratio: float
    learning_rate_scale: float
    region_target: float
    optimal_baseline: float


def random_batch(rng: np.random.Generator) -> Batch:
    """Draw 2 to 64 trajectories of 1 to 400 tokens, from near on policy to badly stale."""
    size = int(rng.integers(2, 65))
    spread = 10.0 ** rng.uniform(-3.0, -1.0)
    lengths = rng.integers(1, 401, size)
    surprisal_nats = rng.uniform(0.1, 1.2)
    rollout = [-rng.exponential(surprisal_nats, length).astype(np.float32) for length in lengths]
    learner = [row + rng.normal(0.0, spread, row.size).astype(np.float32) for row in rollout]
    return Batch(
        learner_logprobs=learner,
        rollout_logprobs=rollout,
        rewards=rng.random(size),
        gradients=rng.normal(0.0, 1.0, (size, GRADIENT_SIZE)) / np.sqrt(lengths)[:, None],
        on_policy_ess_ratio=float(rng.uniform(0.3, 1.0)),
    )


def by_project(batch: Batch) -> Quantities:
    """Compute the quantities with `vcpo.algo`, from log weights and norms."""
    rows = zip(batch.learner_logprobs, batch.rollout_logprobs, strict=True)
    log_ratios = [learner.astype(np.float64) - rollout for learner, rollout in rows]
    log_weights = [math.fsum(each) for each in log_ratios]
    weights = truncated_weights(torch.tensor(log_weights, dtype=torch.float64), TRUNCATION).tolist()
    norms = np.linalg.norm(batch.gradients, axis=1).tolist()
    squared_norms = [(weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True)]
    ratio = ess_ratio(log_weights)
    surprisal_nats = -float(np.concatenate(batch.rollout_logprobs).mean(dtype=np.float64))
    return Quantities(
        ess_ratio=ratio,
        learning_rate_scale=learning_rate_scale(ratio, batch.on_policy_ess_ratio),
        region_target=TrustRegion(horizon_steps=32).read(surprisal_nats).target,
        optimal_baseline=optimal_baseline(batch.rewards.tolist(), squared_norms),
    )


def by_second_derivation(batch: Batch) -> Quantities:
    """Compute the quantities in linear space, from probabilities and whole gradients."""
    rows = zip(batch.learner_logprobs, batch.rollout_logprobs, strict=True)
    quotients = (
        np.exp(learner.astype(np.longdouble)) / np.exp(rollout.astype(np.longdouble))
        for learner, rollout in rows
    )
    weights = np.array([np.prod(each) for each in quotients])
    ratio = 1.0 / (1.0 + np.var(weights) / np.mean(weights) ** 2)
    roots = np.roots([1.0, 0.0, -min(1.0, float(ratio) / batch.on_policy_ess_ratio)])
    weighted = np.minimum(weights, TRUNCATION).astype(np.float64)[:, None] * batch.gradients
    tokens = np.exp(np.concatenate(batch.rollout_logprobs).astype(np.longdouble))
    likely = np.prod(tokens ** (1.0 / len(tokens)))
    targets = batch.rewards[:, None] * weighted
    solution, *_ = np.linalg.lstsq(weighted.reshape(-1, 1), targets.reshape(-1), rcond=None)
    return Quantities(
        ess_ratio=float(ratio),
        learning_rate_scale=float(np.max(np.real(roots))),
        region_target=float(min(0.35, max(0.05, likely ** (-math.log(0.35) / 0.3)))),
        optimal_baseline=float(solution[0]),
    )


def compare(batches: int, seed: int) -> dict[str, float]:
    """Return the largest relative error of each quantity over the batches."""
    rng = np.random.default_rng(seed)
    worst = dict.fromkeys(Quantities.__slots__, 0.0)
    for _ in range(batches):
        batch = random_batch(rng)
        ours, reference = by_project(batch), by_second_derivation(batch)
        for name, so_far in worst.items():
            wanted = getattr(reference, name)  # well above zero
            error = abs(getattr(ours, name) - wanted) / abs(wanted)
            worst[name] = float(np.maximum(so_far, error))  # NaN stays NaN
    return worst


def main() -> int:
    """Print the errors; return 0 when all are within the bar, 1 otherwise."""
    parser = parser_of(
        __doc__, batches=(1000, "random batches to compare"), seed=(0, "seed of the batches")
    )
    options = parser.parse_args()
    if options.batches < 1:
        parser.error(f"--batches is {options.batches}: give at least 1")
    errors = compare(options.batches, options.seed)
    for name, error in errors.items():
        print(f"{name:<20} largest relative error {error:.2e} over {options.batches} batches")
    worst = float(np.max(list(errors.values())))
    passed = worst <= MAX_REL_ERROR
    print(f"{'within' if passed else 'OUTSIDE'} the bar of {MAX_REL_ERROR:g}")
    line = {
        "benchmark": "reference_parity",
        "batches": options.batches,
        "seed": options.seed,
        "max_rel_error": worst,
        "bar": MAX_REL_ERROR,
        "passed": passed,
        "rel_errors": errors,
    }
    print(json.dumps(line))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
