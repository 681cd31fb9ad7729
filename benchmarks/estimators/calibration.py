"""Measure the learning-rate scale of a saturated learner while the engines' mismatch changes.

The learner is the bottleneck: no token of its batches is of its own version. The only fresh tokens
are in a few responses that arrived while the step was computed. The mismatch between the engines
rises evenly over the run, from 0 to 6.5e-4 nats^2 per token, as under a noise schedule. Without
staleness the scale should be 1. With staleness of variance v per token it should be the true scale,
which the same blocks of the same batch get when the mismatch is known: the mismatch sets on-policy
ratio, exponent and dead band. v is 1/2, 1 and 2 over the length. A known mismatch would also divide
some batches into other blocks, which have other noise; the error against those is reported too.

Log ratios of tokens are drawn from normal laws, and no model runs. All else is the learner's code:
blocks of fresh tokens, the calibration and its demand for them, the unit of the ESS, its reading
for a batch of this size, and the verdict.

    python -m benchmarks.estimators.calibration [--workers 8]

Every number of the JSON is that of the worst run; a run has one length, batch size and staleness:

scale_min                    mean scale over a run without staleness
scale_lowest_step            scale of a single step without staleness
relative_error_max           mean over a run with staleness of |scale / true scale - 1|
relative_error_reblocked_max  the same where the true mismatch also sets the blocks
relative_error_largest_step  as relative_error_max, of a single step
fresh_share_max              mean over a run of the share of a batch's tokens scored beside it

The last line printed is JSON.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.harness.made import trajectory
from benchmarks.harness.measures import parser_of
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.importance_weights import WeightMoments
from vcpo.algo.ess.unit import READABLE_NATS, EssKind, EssUnit, ess_reading, ess_unit
from vcpo.algo.ess.verdict import judge_step
from vcpo.algo.methods import Method
from vcpo.api.algorithm import Algorithm
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.batch_decision import batch_ess_unit, batch_moments, decide_step
from vcpo_learner.update.fresh_tokens import fresh_blocks, wanted_fresh_tokens
from vcpo_learner.update.result import BatchSummary

LAST_MISMATCH = 6.5e-4
"""Nats^2 per token at the end, typical of bfloat16."""
LENGTHS = (600, 3000)
BATCHES = (16, 64)
DRIFTS = (0.0, 0.5, 1.0, 2.0)
"""Nats^2 that staleness adds to the log weight of a trajectory."""
ALGORITHM = Algorithm(method=Method.VCPO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The numbers of one step."""

    scale: float
    true_scale: float
    """Of the same blocks when the mismatch of the drawn law is known."""
    true_scale_reblocked: float
    """Of the same batch, which the mismatch of the drawn law may split into other blocks."""
    fresh_tokens: int


def run(
    num_trajectories: int,
    num_tokens: int,
    drift: float,
    steps: int,
    generator: torch.Generator,
    num_workers: int = 1,
) -> list[Step]:
    """Simulate one run; drift: nats^2 of a whole trajectory."""
    calibration, found = MismatchCalibration(), []
    turns = cycle(f"worker-{number}" for number in range(num_workers))
    for step in range(steps):
        mismatch = LAST_MISMATCH * step / (steps - 1)
        wanted = wanted_fresh_tokens(calibration.wanted_count, num_trajectories * num_tokens)
        fresh = draw(math.ceil(wanted / num_tokens), num_tokens, mismatch, generator)
        responses = [response(num_tokens, worker) for worker in islice(turns, len(fresh))]
        ratios = torch.cat(list(fresh))
        blocks = fresh_blocks(responses, ratios, 0, -torch.ones_like(ratios))
        calibration = calibration.observe(blocks)
        stale = mismatch + drift / num_tokens
        ratios = draw(num_trajectories, num_tokens, stale, generator)
        log_ratios = torch.cat(list(ratios))
        batch = BatchSummary(
            group_sizes=[num_trajectories],
            num_tokens=[num_tokens] * num_trajectories,
            rewards=[0.0] * num_trajectories,
            log_weights=[float(each.sum()) for each in ratios],
            squared_norms=[0.0] * num_trajectories,
        )
        unit = batch_ess_unit(batch, ALGORITHM, calibration)
        moments = batch_moments(batch, log_ratios, unit)
        error = calibration.relative_error
        decision = decide_step(unit, moments, ALGORITHM.step_limits, relative_error=error)
        own_unit = ess_unit(ALGORITHM.ess_kind, batch.num_tokens, mismatch)
        own_moments = batch_moments(batch, log_ratios, own_unit)
        found.append(
            Step(
                scale=decision.verdict.scale,
                true_scale=scale_of(under(unit, mismatch), moments),
                true_scale_reblocked=scale_of(own_unit, own_moments),
                fresh_tokens=sum(each.num_tokens for each in blocks),
            )
        )
    return found


def under(unit: EssUnit, mismatch: float) -> EssUnit:
    """A unit's blocks with the ratio and the exponent that they have under the drawn law.

    It is computed here because `ess_unit` would also choose other blocks: -log rho_on is
    log mean exp(s2 n).
    """
    sizes = torch.tensor([size for blocks in unit.blocks for size in blocks], dtype=torch.float64)
    nats = float(torch.logsumexp(mismatch * sizes, 0)) - math.log(len(sizes))
    whole_nats = mismatch * sum(unit.blocks[0])
    exponent = min(whole_nats, READABLE_NATS) / nats if unit.kind is EssKind.BLOCK else 1.0
    return replace(
        unit, exponent=exponent, on_policy_ess_ratio=math.exp(-nats), mismatch_nats=max(nats, 0.0)
    )


def scale_of(unit: EssUnit, moments: WeightMoments) -> float:
    """Return the scale of a batch by a unit whose on-policy ratio is exact."""
    reading = ess_reading(unit, moments)
    ratios = reading.ess_ratio, reading.on_policy_ess_ratio
    return judge_step(*ratios, ALGORITHM.step_limits, chance_nats=reading.chance_nats).scale


def draw(
    count: int, num_tokens: int, variance: float, generator: torch.Generator
) -> Sequence[Tensor]:
    """Draw log ratios of the tokens of trajectories: [count] of [num_tokens] float64 nats."""
    normal = torch.randn((count, num_tokens), generator=generator, dtype=torch.float64)
    return list(normal * math.sqrt(variance) - variance / 2)


def response(num_tokens: int, worker: str) -> Trajectory:
    """Return a response of version 0; only its versions, its length and its worker matter."""
    return trajectory("fresh/0", (0,), (0,) * num_tokens, (0.0,) * num_tokens, worker_id=worker)


def summary(num_trajectories: int, num_tokens: int, run: list[Step]) -> dict[str, float]:
    """Return the numbers of a run."""
    errors = [abs(step.scale / step.true_scale - 1.0) for step in run]
    reblocked = [abs(step.scale / step.true_scale_reblocked - 1.0) for step in run]
    batch_tokens = num_trajectories * num_tokens
    return {
        "scale_mean": fmean(step.scale for step in run),
        "scale_lowest_step": min(step.scale for step in run),
        "true_scale_mean": fmean(step.true_scale for step in run),
        "relative_error_mean": fmean(errors),
        "relative_error_reblocked_mean": fmean(reblocked),
        "relative_error_largest_step": max(errors),
        "fresh_share_mean": fmean(step.fresh_tokens for step in run) / batch_tokens,
    }


def main() -> None:
    """Print one line for each run, and the JSON."""
    arguments = parser_of(
        __doc__,
        steps=(400, "of each run, at least 2"),
        seed=(0, "of all draws"),
        workers=(1, "that sample in turn, at least 1"),
        threads=(1, "CPU threads"),
    ).parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    rows = []
    for num_tokens, num_trajectories, drift in product(LENGTHS, BATCHES, DRIFTS):
        place = num_trajectories, num_tokens, drift
        steps = run(*place, arguments.steps, generator, arguments.workers)
        rows.append((drift, row := summary(num_trajectories, num_tokens, steps)))
        print(
            f"B {num_trajectories:>2}  L {num_tokens:>4}  drift {drift:g}:"
            f" mean scale {row['scale_mean']:.3f} of {row['true_scale_mean']:.3f},"
            f" lowest step {row['scale_lowest_step']:.3f};"
            f" mean error {row['relative_error_mean']:.3f},"
            f" {row['relative_error_reblocked_mean']:.3f} own blocks,"
            f" largest step {row['relative_error_largest_step']:.3f};"
            f" mean scored beside {row['fresh_share_mean']:.3f}",
            flush=True,
        )
    fresh = [row for drift, row in rows if drift == 0.0]
    stale = [row for drift, row in rows if drift > 0.0]
    result = {
        "scale_min": min(row["scale_mean"] for row in fresh),
        "scale_lowest_step": min(row["scale_lowest_step"] for row in fresh),
        "relative_error_max": max(row["relative_error_mean"] for row in stale),
        "relative_error_reblocked_max": max(row["relative_error_reblocked_mean"] for row in stale),
        "relative_error_largest_step": max(row["relative_error_largest_step"] for row in stale),
        "fresh_share_max": max(row["fresh_share_mean"] for _, row in rows),
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
