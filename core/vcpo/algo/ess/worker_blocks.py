"""Fresh blocks of one worker: sums over portions of them, kept for a run of any length.

A portion is at least `minimum_count` blocks, clipped to their own law. Old portions are merged in
pairs, so that at most two of each size remain: 1, 1, 2, 2, 4, 4, .. 64, 64 portions at most. They
hold the last 254 portions or less, in at most 14 sums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

Block = tuple[float, int]
"""Log weight of a block, nats, and its tokens."""

_REACH: Final = 3.0
"""Standard deviations to which a log weight is clipped."""

_EXTREME_SHARE: Final = 1 / 16
"""Share of a portion's blocks, the most extreme ones, that is winsorized before the scale is
taken."""

_LARGEST_MERGED: Final = 64
"""Most portions in one sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSums:
    """Sums over the fresh blocks of one or several portions."""

    count: int
    """Number of blocks, at least 1."""

    num_tokens: int
    """Tokens of all blocks, at least one each."""

    square_sum: float
    """Sum of (log w)^2 / tokens over blocks, log w clipped; nats^2 per token, finite, >= 0."""

    num_portions: int = 1
    """Portions that are added up here, at least 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_portions <= self.count <= self.num_tokens:
            raise ValueError(
                f"num_portions is {self.num_portions}, count {self.count} and num_tokens "
                f"{self.num_tokens}: give at least 1, no more portions than blocks, and no more "
                "blocks than tokens"
            )
        if not 0.0 <= self.square_sum < math.inf:
            raise ValueError(f"square_sum is {self.square_sum}: give a finite number, 0 or above")

    def __add__(self, other: "FreshSums") -> "FreshSums":
        """Return the sums over the blocks of both."""
        return FreshSums(
            count=self.count + other.count,
            num_tokens=self.num_tokens + other.num_tokens,
            square_sum=self.square_sum + other.square_sum,
            num_portions=self.num_portions + other.num_portions,
        )

    @property
    def variance_per_token(self) -> float:
        """Maximum-likelihood estimate of s2, nats^2 per token, at least 0.

        Computed with sqrt(1 + AQ) - 1 = AQ / (sqrt(1 + AQ) + 1), which is exact for a tiny AQ.
        """
        mean_length = self.num_tokens / self.count
        mean_square = self.square_sum / self.count
        return 2.0 * mean_square / (math.sqrt(1.0 + mean_length * mean_square) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBlocks:
    """What a worker's fresh blocks have shown; immutable."""

    portions: tuple[FreshSums, ...] = ()
    """Sums over its portions, oldest first; the worker counts if there is one."""

    waiting: tuple[Block, ...] = ()
    """Blocks of the next portion, which are too few for one."""

    last_step: int = 0
    """Number of the last step in which it showed a block."""

    def observe(self, blocks: Sequence[Block], *, step: int, minimum_count: int) -> Self:
        """Return the worker after a step in which it showed blocks.

        blocks: finite log weights, and at least one token each.
        minimum_count: of the blocks of a portion, at least 1.
        """
        waiting = (*self.waiting, *blocks)
        if len(waiting) < minimum_count:
            return type(self)(portions=self.portions, waiting=waiting, last_step=step)
        portion = clipped_sums(waiting)
        return type(self)(portions=_merge_portions((*self.portions, portion)), last_step=step)

    def to_dict(self) -> dict[str, Any]:
        """Return the worker as JSON values."""
        return {
            "portions": [
                [each.count, each.num_tokens, each.square_sum, each.num_portions]
                for each in self.portions
            ],
            "waiting": [list(block) for block in self.waiting],
            "last_step": self.last_step,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what `to_dict` returned.

        Raises: KeyError, TypeError or ValueError if the state has another form.
        """
        waiting = tuple((float(log_weight), int(length)) for log_weight, length in state["waiting"])
        if not all(math.isfinite(log_weight) and length > 0 for log_weight, length in waiting):
            raise ValueError("waiting has a block without a finite log weight or without a token")
        return cls(
            portions=tuple(
                FreshSums(
                    count=int(count),
                    num_tokens=int(num_tokens),
                    square_sum=float(square_sum),
                    num_portions=int(num_portions),
                )
                for count, num_tokens, square_sum, num_portions in state["portions"]
            ),
            waiting=waiting,
            last_step=int(state["last_step"]),
        )


def clipped_sums(blocks: Sequence[Block]) -> FreshSums:
    """Return the sums over a portion's blocks, each clipped to `_REACH` deviations of its law."""
    return _sums(blocks, _sums(blocks, _winsorized_variance(blocks)).variance_per_token)


def _merge_portions(portions: Sequence[FreshSums]) -> tuple[FreshSums, ...]:
    """Return the portions with the older two of every three of one size added up."""
    kept = list(portions)
    for first in range(len(kept) - 3, -1, -1):
        if kept[first].num_portions == kept[first + 2].num_portions:
            if kept[first].num_portions >= _LARGEST_MERGED:
                del kept[first]
            else:
                kept[first : first + 2] = [kept[first] + kept[first + 1]]
    return tuple(kept)


def _winsorized_variance(blocks: Sequence[Block]) -> float:
    """Return the variance per token with the largest squares replaced by the next lower one."""
    num_extreme = math.ceil(_EXTREME_SHARE * len(blocks))
    squares = sorted(x * x / length for x, length in blocks)
    kept = squares[:-num_extreme] or squares
    return FreshSums(
        count=len(blocks),
        num_tokens=sum(length for _, length in blocks),
        square_sum=math.fsum(kept) + (len(blocks) - len(kept)) * kept[-1],
    ).variance_per_token


def _sums(blocks: Sequence[Block], variance_per_token: float) -> FreshSums:
    """Return the sums over blocks, with log weights clipped to the law of this variance."""
    squares = []
    for x, length in blocks:
        variance = variance_per_token * length
        reach = _REACH * math.sqrt(variance)
        clipped = min(max(x, -variance / 2 - reach), -variance / 2 + reach)
        squares.append(clipped * clipped / length)
    return FreshSums(
        count=len(blocks),
        num_tokens=sum(length for _, length in blocks),
        square_sum=math.fsum(squares),
    )
