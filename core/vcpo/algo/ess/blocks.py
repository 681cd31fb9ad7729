"""Division of a trajectory into blocks of nearly equal length, each with its own importance weight.

The importance weight of a trajectory is the product of its token ratios. The weight of a block is
the product of the block's token ratios. Blocks of one token give the token ratios; a single block
gives the weight of the trajectory.
"""

import math
from typing import SupportsInt

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.importance_weights import require_log_weights


def near_equal_blocks(num_tokens: SupportsInt, size: SupportsInt) -> tuple[int, ...]:
    """Return the number of tokens of each block of a trajectory, longer blocks first.

    There are num_tokens / size blocks, rounded, and at least one. Lengths differ by at most 1.
    """
    num_tokens = int(num_tokens)
    count = max(1, round(num_tokens / int(size)))
    shorter, longer = divmod(num_tokens, count)
    return (shorter + 1,) * longer + (shorter,) * (count - longer)


def block_log_weights(log_ratios: Vector, blocks: Vector) -> list[float]:
    """Return the log weight of each block of a trajectory, nats: the sum of its log ratios.

    log_ratios: [num_tokens] log pi - log mu of the trained tokens, nats.
    blocks: [num_blocks] number of tokens of each block.
    Raises: ValueError if the blocks do not add up to the trajectory; NonFiniteWeightError for a log
    ratio that is NaN or +inf.
    """
    log_ratios, blocks = vector(log_ratios, "log_ratios"), counts(blocks, "blocks")
    if sum(blocks) != len(log_ratios):
        raise ValueError(
            f"blocks add up to {sum(blocks)} tokens and log_ratios has {len(log_ratios)}: "
            "divide the trajectory by its own length"
        )
    require_log_weights(log_ratios, "log_ratios")
    tokens = iter(log_ratios)
    return [math.fsum(next(tokens) for _ in range(block)) for block in blocks]
