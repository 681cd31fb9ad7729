"""A step between its gradient and its decision: fresh tokens that arrive meanwhile count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vcpo.algo import NonFiniteWeightError, TokenSums
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import BatchRecord
from vcpo_learner.update.batch_decision import BatchSummary
from vcpo_learner.update.fresh_tokens import FreshBlocks
from vcpo_learner.update.result import UpdateTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchGradient:
    """A batch whose gradient the parameters' `.grad` hold."""

    record: BatchRecord
    summary: BatchSummary
    sums: TokenSums
    advantages: Sequence[float]
    """[B], the groups one after another."""
    masked_share: float
    """Share of tokens whose clip factor is 0, in [0, 1]."""
    fresh: FreshBlocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingStep:
    """A step that is not decided yet. Owner: the tensor thread."""

    trajectories: Sequence[Trajectory]
    policy_version: int
    """The version that the parameters are."""
    batch: BatchGradient | NonFiniteWeightError
    """The error says why the batch has no gradient."""
    wanted_fresh_tokens: int
    """Tokens of that version to pass to `finish` for calibration, if there are any."""
    times: UpdateTimes = field(default_factory=UpdateTimes)
    """Time that the step has taken so far."""
