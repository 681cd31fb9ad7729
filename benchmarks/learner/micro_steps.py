"""Tokens that micro-steps compute, over those of the trajectories in them.

The product's own schedule splits batches of log-normal lengths for one rank, padded and packed:

    python -m benchmarks.learner.micro_steps

The last line printed is JSON: the largest ratios. Aims: at most 1.15 padded, and 1 packed.
"""

import json
from itertools import product

from benchmarks.harness.random_llama import log_normal_lengths
from vcpo_learner.schedule.micro_steps import MicroBatchBudget, micro_steps

BUDGETS = (7_862, 40_784, 100_000)  # what three cards hold at 1.5 B parameters
BATCHES = ((128, 300, 1024), (128, 512, 2048), (512, 512, 2048))
"""Responses, their median and largest length; the logarithm of a length has a deviation of 1."""
PROMPT_TOKENS = 100


def main() -> None:
    """Print a line for each batch and budget, and the largest ratios as JSON."""
    largest = {"padded": 0.0, "packed": 0.0}
    for (rows, median, most), tokens, layout in product(BATCHES, BUDGETS, largest):
        drawn = log_normal_lengths(rows, median=median, most=most)
        lengths = [each + PROMPT_TOKENS for each in drawn]
        budget = MicroBatchBudget(
            trajectories=rows, tokens=tokens, counts_padding=layout == "padded"
        )
        steps = micro_steps(lengths, 1, budget)
        computed = sum(budget.tokens_of([lengths[at] for at in part]) for (part,) in steps)
        ratio = round(computed / sum(lengths), 3)
        largest[layout] = max(largest[layout], ratio)
        print(f"{rows} x {median}, {tokens} tokens, {layout}: {len(steps)} micro-steps, {ratio}")
    print(json.dumps({f"{layout}_over_real_max": each for layout, each in largest.items()}))


if __name__ == "__main__":
    main()
