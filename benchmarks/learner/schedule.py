"""Measure how evenly the schedule of micro-steps shares work among ranks.

Lengths are log-normal, truncated at the budget of tokens. `efficiency` is the work of an even split
without padding, tokens over ranks, divided by what the ranks compute: the sum over micro-steps of
the largest micro-batch of a rank, because all ranks wait for it. No schedule has more than 1.

    python -m benchmarks.learner.schedule

The last line printed is JSON, by layout, ranks and spread of the lengths; `milliseconds` is the
time to make the schedule, on one CPU.
"""

import json
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from vcpo_learner.schedule.micro_steps import MicroBatchBudget, group_micro_steps, micro_steps

TRAJECTORIES, GROUP_SIZE = 1024, 8
MEDIAN_TOKENS, BUDGET_TOKENS = 4096, 32_768
LAYOUTS = {
    "padded": MicroBatchBudget(trajectories=TRAJECTORIES, tokens=BUDGET_TOKENS),
    "packed": MicroBatchBudget(
        trajectories=TRAJECTORIES, tokens=BUDGET_TOKENS, counts_padding=False
    ),
}


def lengths_of_spread(spread: float) -> list[int]:
    """Return the tokens of trajectories; spread: standard deviation of their logarithm."""
    random = Random(0)  # noqa: S311 - lengths, not secrets
    drawn = (random.gauss(math.log(MEDIAN_TOKENS), spread) for _ in range(TRAJECTORIES))
    return [min(max(round(math.exp(each)), 64), BUDGET_TOKENS) for each in drawn]


def measure(lengths: Sequence[int], num_ranks: int, budget: MicroBatchBudget) -> dict[str, Any]:
    """Measure a pass over all trajectories, and one over whole groups, in replicas of 8 ranks."""
    groups = [lengths[at : at + GROUP_SIZE] for at in range(0, TRAJECTORIES, GROUP_SIZE)]
    num_shards = min(num_ranks, 8)
    started_s = time.perf_counter()
    steps = micro_steps(lengths, num_ranks, budget)
    between_s = time.perf_counter()
    replicas = group_micro_steps(groups, num_ranks // num_shards, num_shards, budget)
    ended_s = time.perf_counter()
    computed = sum(
        max(budget.tokens_of([lengths[at] for at in part]) for part in step) for step in steps
    )
    computed_by_groups = max(
        sum(
            max(
                budget.tokens_of(
                    [
                        groups[number][at]
                        for number, members in zip(step.groups, shard, strict=True)
                        for at in members
                    ]
                )
                for shard in step.shards
            )
            for step in replica
        )
        for replica in replicas
    )
    even = sum(lengths) / num_ranks
    return {
        "efficiency": round(even / computed, 3),
        "efficiency_of_groups": round(even / computed_by_groups, 3),
        "milliseconds": round(1e3 * (between_s - started_s), 1),
        "milliseconds_of_groups": round(1e3 * (ended_s - between_s), 1),
    }


def main() -> None:
    """Measure every case and print JSON."""
    report = {}
    for layout, budget in LAYOUTS.items():
        for num_ranks in (1, 2, 8, 64):
            for spread in (0.25, 0.5, 1.0):
                name = f"{layout}, {num_ranks} ranks, spread {spread}"
                report[name] = measure(lengths_of_spread(spread), num_ranks, budget)
                print(name, report[name], flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
