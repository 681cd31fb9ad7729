"""A step between its gradient and its decision: what is learned meanwhile may still shrink it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from vcpo.algo import NonFiniteWeightError, TokenSums
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.batch_decision import ScoredTrajectory
from vcpo_learner.update.fresh_tokens import FreshPieces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredBatch:
    """A batch whose gradient stands in the parameters' `.grad`."""

    groups: Sequence[Sequence[ScoredTrajectory]]
    log_ratios: Sequence[Tensor]
    """[B] of [T_i] log pi - log mu of the sampled tokens, nats."""
    sums: TokenSums
    advantages: Sequence[float]
    """[B], the groups one after another."""
    masked_share: float
    """Share of tokens that the gate left nothing of."""
    fresh: FreshPieces

    @property
    def log_weights(self) -> tuple[float, ...]:
        """Log importance weights, nats, untruncated, the groups one after another."""
        return tuple(each.log_weight for each in chain.from_iterable(self.groups))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingStep:
    """A step that is not decided yet."""

    trajectories: Sequence[Trajectory]
    policy_version: int
    """The version that the parameters are."""
    batch: GatheredBatch | NonFiniteWeightError
    """Or what keeps its gradient from being a number."""
    wanted_fresh_tokens: int
    """Tokens of that version to give to `finish` for calibration, where there are any."""
