"""Trajectories cut into pieces of near equal length, each with a weight of its own.

The product of a trajectory's token ratios is its importance weight; the product over a piece is the
piece's. Pieces of one token give token ratios, one piece gives the trajectory's weight.
"""

import math
from typing import SupportsInt

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.importance_weights import require_log_weights


def near_equal_blocks(num_tokens: SupportsInt, size: SupportsInt) -> tuple[int, ...]:
    """Tokens of the pieces of about `size` that a trajectory is cut into, longer ones first.

    There are num_tokens / size of them, rounded, at least one, and they differ by 1 at most.
    """
    num_tokens = int(num_tokens)
    count = max(1, round(num_tokens / int(size)))
    shorter, longer = divmod(num_tokens, count)
    return (shorter + 1,) * longer + (shorter,) * (count - longer)


def block_log_weights(log_ratios: Vector, pieces: Vector) -> list[float]:
    """Log weights of the pieces of one trajectory, nats: sums of its tokens' log ratios.

    log_ratios: [num_tokens] log pi - log mu of the trained tokens; pieces: tokens of each piece.
    Raises: ValueError when the pieces do not add up to the trajectory; NonFiniteWeightError at a
    log ratio that is NaN or +inf.
    """
    log_ratios, pieces = vector(log_ratios, "log_ratios"), counts(pieces, "pieces")
    if sum(pieces) != len(log_ratios):
        raise ValueError(
            f"pieces add up to {sum(pieces)} tokens and log_ratios has {len(log_ratios)}: "
            "cut the trajectory by its own length"
        )
    require_log_weights(log_ratios, "log_ratios")
    tokens = iter(log_ratios)
    return [math.fsum(next(tokens) for _ in range(piece)) for piece in pieces]
