"""Tokens that micro-steps compute, over those of the trajectories in them.

The product's own schedule splits batches of log-normal lengths for one rank, padded and packed:

    python -m benchmarks.learner.micro_steps

The budgets are the tokens that memory leaves a learner of 1.5 B parameters: beside a worker on a
card of 80 GB, alone on it, and on one of 140. The last line printed is JSON: the largest ratio of
any batch and budget. Aims: at most 1.15 padded, and 1 packed.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Final, NamedTuple

from vcpo_learner.schedule.micro_steps import MicroBatchBudget, micro_steps

_BUDGETS: Final = (7_862, 40_784, 100_000)
_PROMPT: Final = 100


class Lengths(NamedTuple):
    """A batch of responses; the logarithm of a length has a deviation of 1."""

    rows: int
    median: int
    longest: int

    def draw(self) -> list[int]:
        """Return lengths of whole trajectories."""
        random = Random(0)  # noqa: S311 - lengths, no secret
        drawn = (random.lognormvariate(math.log(self.median), 1.0) for _ in range(self.rows))
        return [min(self.longest, max(1, int(each))) + _PROMPT for each in drawn]


_BATCHES: Final = (Lengths(128, 300, 1024), Lengths(128, 512, 2048), Lengths(512, 512, 2048))


def computed_over_real(lengths: list[int], tokens: int, *, packed: bool) -> tuple[int, float]:
    """Return the number of micro-steps, and the tokens they compute over those there are."""
    budget = MicroBatchBudget(trajectories=len(lengths), tokens=tokens, counts_padding=not packed)
    steps = micro_steps(lengths, 1, budget)
    computed = sum(budget.tokens_of([lengths[at] for at in part]) for (part,) in steps)
    return len(steps), computed / sum(lengths)


def main() -> None:
    """Print a line for each batch and budget, and the largest ratios as JSON."""
    largest = {True: 0.0, False: 0.0}
    for batch in _BATCHES:
        for tokens in _BUDGETS:
            for packed in largest:
                count, ratio = computed_over_real(batch.draw(), tokens, packed=packed)
                largest[packed] = max(largest[packed], ratio)
                print(f"{batch} {tokens=} {packed=}: {count} micro-steps, {ratio:.3f}")
    found = {"padded_over_real_max": largest[False], "packed_over_real_max": largest[True]}
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
