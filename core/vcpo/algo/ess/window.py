"""ESS over the weights of the last few batches, pooled.

A single batch of B cannot show an ESS ratio below 1/B, and its value scatters. The pool of n
batches has n B weights: it can show n times less, and a rare huge weight, whose absence makes
single batches look better than they are, stays in it for n steps. The pool is therefore cautious,
and slow to recover by design: a rule that damps by it should also look at the batch itself.

Batches are pooled by their moments, unscaled: weights are ratios of probabilities, with mean 1 in
every batch, so a batch whose weights are all small is one that the learner has left behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from vcpo.algo.ess.moments import WeightMoments, entry, moments_from


@dataclass(frozen=True, slots=True, kw_only=True)
class EssWindow:
    """Moments of the weights of the last batches; immutable."""

    size: int = 8
    """Batches that are pooled, at least 1; 8 follow a change within a few steps."""

    batches: tuple[WeightMoments, ...] = ()
    """Moments of the batches still in the window, oldest first."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}: give at least 1 batch")

    def observe(self, batch: WeightMoments) -> Self:
        """Window that has also seen a batch, and has let go of the oldest beyond its size."""
        return replace(self, batches=(*self.batches, batch)[-self.size :])

    @property
    def pooled(self) -> WeightMoments | None:
        """Moments of all weights in the window; None before the first batch."""
        return WeightMoments.merge(self.batches) if self.batches else None

    @property
    def ess_ratio(self) -> float | None:
        """ESS ratio of the pool, in (0, 1]; None before the first batch.

        Raises: NonFiniteWeightError when every weight in the window is 0.
        """
        pooled = self.pooled
        return None if pooled is None else pooled.ess_ratio

    def to_dict(self) -> dict[str, Any]:
        """What was observed, as plain JSON values for a checkpoint; settings are not part of it."""
        return {"batches": [batch.to_list() for batch in self.batches]}

    def restored(self, state: Mapping[str, Any]) -> Self:
        """This window's settings with the batches that `to_dict` returned, the newest that fit.

        Raises: ValueError when the state has another form.
        """
        batches = tuple(moments_from(row) for row in entry(state, "batches", "EssWindow"))
        return replace(self, batches=batches[-self.size :])
