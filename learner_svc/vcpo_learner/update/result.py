"""A step between its gradient and its decision, and what it returns when it is taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.health.diagnostics import TokenSums
from vcpo.algo.health.fresh_tokens import FreshBlock
from vcpo.algo.health.mismatch_review import MismatchReview
from vcpo.metrics.label_values import MemoryState
from vcpo.records.step_record import UpdateRecord
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import BatchRecord
from vcpo_learner.forward.token_batch import BatchTokens, TokenBatch


@dataclass(slots=True, kw_only=True)
class UpdateTimes:
    """Seconds that one update took, by stage.

    A GPU works behind the clock: what is queued when a stage ends counts as the next stage's.
    """

    score_s: float = 0.0
    """Forward passes whose results are only read, and the norms measured with them."""
    backward_s: float = 0.0
    """Backward passes; the forward passes too, where one pass does both."""
    optimizer_s: float = 0.0
    """The decision about the step, and the step."""

    def by_stage(self) -> dict[str, float]:
        return {
            "score": self.score_s,
            "backward": self.backward_s,
            "optimizer": self.optimizer_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult(UpdateRecord):
    """The record of an update, and numbers that are used at once and not recorded."""

    log_weights: tuple[float, ...] = ()
    """Log importance weights, nats, untruncated, the groups one after another; -inf is a weight of
    0. Empty when one has no value."""
    fresh: tuple[FreshBlock, ...] = ()
    """Tokens that were scored with the version that sampled them; those beside the batch too."""
    mismatch: MismatchReview = field(default_factory=MismatchReview)
    """Review of the workers by these fresh tokens."""
    reward_limits: tuple[float, float] | None = None
    """Smallest and largest reward that is not far from those of the steps before; None for the
    first step."""
    times: UpdateTimes = field(default_factory=UpdateTimes, compare=False)
    memory: Mapping[MemoryState, int] | None = field(default=None, compare=False)
    """Bytes of the device after the update; None on a CPU."""
    skip_detail: str | None = None
    """The number because of which the step was skipped, for people; None when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What the decision needs to know of a batch; [B] numbers, the groups one after another."""

    group_sizes: Sequence[int]
    """[num_groups]"""
    num_tokens: Sequence[int]
    """Trained tokens of each trajectory, at least 1."""
    rewards: Sequence[float]
    """Finite; the rewards that the baseline is computed from."""
    log_weights: Sequence[float]
    """Log importance weights, nats, untruncated."""
    squared_norms: Sequence[float]
    """Squared norm of each trajectory's contribution to the gradient, for an advantage of 1; 0 if
    it was not measured."""


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
    fresh: tuple[FreshBlock, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A forward pass whose graph is kept: one backward pass may use it."""

    positions: Sequence[int]
    """Positions in the batch of the trajectories that it scored."""
    logprobs: Tensor
    """[positions, width] nats."""
    batch: TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """A batch after the first pass."""

    record: BatchRecord
    tokens: BatchTokens
    summary: BatchSummary
    is_accumulated: bool
    graph: Graph | None = None
    """Graph of the first pass, if one micro-batch held all trajectories that the second pass may
    use."""
