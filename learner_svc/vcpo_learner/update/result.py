"""What an update returns: the numbers that are recorded, and those that its caller needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vcpo.algo import FreshTokens, MismatchReview
from vcpo.records.step_record import UpdateRecord
from vcpo_learner.device import DeviceMemory


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
        """Return the seconds of each stage, by its name."""
        return {
            "score": self.score_s,
            "backward": self.backward_s,
            "optimizer": self.optimizer_s,
        }

    def after(self, *, score_s: float, step_s: float) -> UpdateTimes:
        """Return the times of a finished update: these, more scoring, and the step."""
        return UpdateTimes(
            score_s=self.score_s + score_s, backward_s=self.backward_s, optimizer_s=step_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult(UpdateRecord):
    """The record of an update, and numbers that are used at once and not recorded."""

    log_weights: tuple[float, ...] = ()
    """Log importance weights, nats, untruncated, the groups one after another; -inf is a weight of
    0. Empty when one has no value."""
    fresh: Mapping[str, FreshTokens] = field(default_factory=dict)
    """Tokens that were scored with the version that sampled them, by worker; those beside the batch
    too."""
    mismatch: MismatchReview = field(default_factory=MismatchReview)
    """Review of the workers by these fresh tokens."""
    reward_limits: tuple[float, float] | None = None
    """Smallest and largest reward that is not far from those of the steps before; None for the
    first step."""
    times: UpdateTimes = field(default_factory=UpdateTimes, compare=False)
    memory: DeviceMemory | None = field(default=None, compare=False)
    """Memory of the device after the update; None on a CPU."""
    skip_detail: str | None = None
    """The number because of which the step was skipped, for people; None when there is none."""
