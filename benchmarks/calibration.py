"""What a saturated learner scales its learning rate by while the mismatch of the engines moves.

The learner is the bottleneck: not one token of its batches is of its own version. What is fresh are
a few answers that arrived while the step was computed, and the mismatch between the engines rises
evenly over the run, from 0 to 6.5e-4 nats^2 a token, as under a noise schedule. Without staleness
the scale should be 1. With staleness of a variance v a token it should be what the same batch would
be given if the on-policy ratio were known; v is 1/2, 1 and 2 over the length.

Log ratios of tokens are drawn from normal laws, no model is run; what becomes of them is the
learner's own code: pieces of fresh tokens, the calibration with its appetite for them, the unit of
the ESS, its reading for a batch of this size, and the verdict.

    python -m benchmarks.calibration

scale_min            lowest mean scale of a run without staleness; single steps are lower by chance
                     (`scale_lowest_step`), which on policy is what the dead band is for
relative_error_max   largest mean over a run of |scale / scale under the true ratio - 1|; one step's
                     may be far larger (`relative_error_largest_step`), see below
fresh_share_max      largest mean share of a batch's tokens that was scored beside it

The error of one step has a limit. With m pieces a step, the last W steps know the variance to
sqrt(2 / (m W)) of it, and a mismatch that grows with the step number t was W / 2t of it less in
their mean. With m = 94 (a quarter of 16 answers of 3,000 tokens is 375) and t = 100 the two are
least together at W = 10: 4 % and 5 %; a scale of exp(-s2 L / 2) turns them into up to as much
again, and a batch at the edge of the dead band into twice that. The last line printed is JSON.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vcpo.algo import EssUnit, MismatchCalibration, ess_reading, ess_unit, judge_step
from vcpo.spec.algorithm import Algorithm
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.batch_signals import moments_of_batch
from vcpo_learner.decision import ScoredTrajectory, decide
from vcpo_learner.freshness import fresh_pieces, wanted_fresh_tokens

LAST_MISMATCH = 6.5e-4
"""Nats^2 per token at the end, typical of bfloat16."""
LENGTHS = (600, 3000)
BATCHES = (16, 64)
DRIFTS = (0.0, 0.5, 1.0, 2.0)
"""Nats^2 that staleness adds to the log weight of a trajectory."""
ALGORITHM = Algorithm()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step came to."""

    scale: float
    true_scale: float
    """Under the on-policy ratio that the drawn law has."""
    fresh_tokens: int


def run(
    num_trajectories: int, num_tokens: int, drift: float, steps: int, generator: torch.Generator
) -> list[Step]:
    """One run; drift: nats^2 of a whole trajectory."""
    calibration, found = MismatchCalibration(), []
    for step in range(steps):
        mismatch = LAST_MISMATCH * step / (steps - 1)
        wanted = wanted_fresh_tokens(calibration, num_trajectories * num_tokens)
        fresh = draw(math.ceil(wanted / num_tokens), num_tokens, mismatch, generator)
        pieces = fresh_pieces([answer(num_tokens)] * len(fresh), fresh, policy_version=0)
        calibration = calibration.observe(pieces.log_weights, pieces.num_tokens)
        stale = mismatch + drift / num_tokens
        ratios = draw(num_trajectories, num_tokens, stale, generator)
        batch = [
            ScoredTrajectory(
                reward=0.0,
                num_tokens=num_tokens,
                log_weight=float(each.sum()),
                squared_gradient_norm=0.0,
            )
            for each in ratios
        ]
        moments_of = partial(moments_of_batch, batch, ratios, math.inf)
        decision = decide(batch, ALGORITHM, calibration, moments_of)
        unit = ess_unit(
            ALGORITHM.ess_kind, [num_tokens] * num_trajectories, calibration.variance_per_token
        )
        reading = ess_reading(with_true_ratio(unit, mismatch), moments_of(unit))
        true = judge_step(
            reading.ess_ratio,
            reading.on_policy_ess_ratio,
            ALGORITHM.step_limits,
            chance_nats=reading.chance_nats,
        )
        found.append(
            Step(
                scale=decision.verdict.scale,
                true_scale=true.scale,
                fresh_tokens=sum(pieces.num_tokens),
            )
        )
    return found


def draw(
    count: int, num_tokens: int, variance: float, generator: torch.Generator
) -> Sequence[Tensor]:
    """Log ratios of the tokens of some trajectories, [count] of [num_tokens] float64 nats."""
    normal = torch.randn((count, num_tokens), generator=generator, dtype=torch.float64)
    return list(normal * math.sqrt(variance) - variance / 2)


def answer(num_tokens: int) -> Trajectory:
    """An answer of version 0; only versions and lengths of it are looked at."""
    return Trajectory(
        trajectory_id="fresh/0",
        prompt_token_ids=(0,),
        response_token_ids=(0,) * num_tokens,
        rollout_logprobs=(0.0,) * num_tokens,
        version_spans=(VersionSpan(policy_version=0, num_tokens=num_tokens),),
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )


def with_true_ratio(unit: EssUnit, mismatch: float) -> EssUnit:
    """The same pieces with the on-policy ratio of the law, 1 / mean exp(s2 n)."""
    sizes = [size for pieces in unit.pieces for size in pieces]
    nats = math.log(fmean(math.exp(mismatch * size) for size in sizes))
    return replace(unit, on_policy_ess_ratio=math.exp(-nats), mismatch_nats=nats)


def summary(
    num_trajectories: int, num_tokens: int, drift: float, run: list[Step]
) -> dict[str, Any]:
    """A run's numbers."""
    errors = [abs(step.scale / step.true_scale - 1.0) for step in run]
    return {
        "trajectories": num_trajectories,
        "tokens": num_tokens,
        "drift": drift,
        "scale": fmean(step.scale for step in run),
        "scale_lowest_step": min(step.scale for step in run),
        "true_scale": fmean(step.true_scale for step in run),
        "relative_error": fmean(errors),
        "relative_error_largest_step": max(errors),
        "fresh_share": fmean(step.fresh_tokens for step in run) / (num_trajectories * num_tokens),
    }


def main() -> None:
    """Print a line a run, and the JSON."""
    parser = argparse.ArgumentParser(
        description="Follow a moving mismatch in a saturated learner.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="of each run, at least 2")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    rows = []
    for num_tokens in LENGTHS:
        for num_trajectories in BATCHES:
            for drift in DRIFTS:
                steps = run(num_trajectories, num_tokens, drift, arguments.steps, generator)
                row = summary(num_trajectories, num_tokens, drift, steps)
                rows.append(row)
                print(
                    f"B {num_trajectories:>2}  L {num_tokens:>4}  drift {drift:g}:"
                    f" scale {row['scale']:.3f} of {row['true_scale']:.3f},"
                    f" lowest {row['scale_lowest_step']:.3f};"
                    f" error {row['relative_error']:.3f},"
                    f" largest {row['relative_error_largest_step']:.3f};"
                    f" scored beside {row['fresh_share']:.3f}",
                    flush=True,
                )
    fresh = [row for row in rows if row["drift"] == 0.0]
    stale = [row for row in rows if row["drift"] > 0.0]
    result = {
        "scale_min": min(row["scale"] for row in fresh),
        "scale_lowest_step": min(row["scale_lowest_step"] for row in fresh),
        "relative_error_max": max(row["relative_error"] for row in stale),
        "relative_error_largest_step": max(row["relative_error_largest_step"] for row in stale),
        "fresh_share_max": max(row["fresh_share"] for row in rows),
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
