"""What fresh tokens say: how far the engines are apart on policy, and which workers are at fault.

Every rank holds the same, and a redone step does as it did the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.health.fresh_tokens import MIN_FRESH_BLOCKS
from vcpo.algo.health.mismatch_limits import MismatchLimits
from vcpo.algo.health.mismatch_review import MismatchReview, MismatchWindow
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.fresh_tokens import FreshBlocks, wanted_fresh_tokens
from vcpo_learner.update.micro_batches import MicroBatchRunner
from vcpo_learner.update.rounding import rounding_limits


class MismatchJudge:
    """Calibration, window and limits of a run. Owner: the update."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self._spec = spec
        self._is_ratio_given = spec.algorithm.on_policy_ess_ratio is not None
        given = spec.learner.max_mismatch_nats
        self._given = None if given is None else MismatchLimits.of_gap(given)
        self._limits = self._given
        self._window = MismatchWindow()
        self._is_exceeded = False
        """Whether the last review says so: the limits are then measured again."""
        self.calibration = MismatchCalibration()
        """Without the blocks of workers at fault."""

    @property
    def calibration_age_steps(self) -> int:
        """Steps since the calibration had fresh tokens; 0 if the spec gives the ratio."""
        return 0 if self._is_ratio_given else self.calibration.age_steps

    def wanted_fresh_tokens(self, num_blocks: int, batch_tokens: int) -> int:
        """Return the number of fresh tokens to score beside a batch with this many fresh blocks."""
        # A ratio that is given needs no calibration, but workers are compared at every step.
        wanted = MIN_FRESH_BLOCKS if self._is_ratio_given else self.calibration.wanted_count
        return wanted_fresh_tokens(wanted - num_blocks, batch_tokens)

    def measure_rounding(
        self, runner: MicroBatchRunner, groups: Sequence[Sequence[Trajectory]]
    ) -> None:
        """Measure the limits on a batch, if there are none or the last ones were exceeded.

        To be called before the first backward pass of a step.
        """
        if self._given is None and (self._limits is None or self._is_exceeded):
            self._set_limits(rounding_limits(runner, groups, self._spec))

    def observe(self, fresh: FreshBlocks) -> MismatchReview:
        """Return what the window says with a step's fresh blocks; leave out workers at fault.

        They are left out here and not when they are set aside, so that a redone step does the same.
        """
        observed = self.calibration.observe(fresh.log_weights, fresh.num_tokens, fresh.workers)
        window = self._window.observe(fresh.by_worker)
        review = window.review(self._limits, observed)
        names = [fault.worker for fault in review.at_fault]
        self.calibration, self._window = observed.without(names), window.without(names)
        self._is_exceeded = review.is_exceeded
        if self._limits is not None and self._given is None:
            self._limits = replace(self._limits, is_current=False)
        return review

    def state_dict(self) -> dict[str, Any]:
        """Return what the next review depends on, for a checkpoint."""
        return {
            "calibration": self.calibration.to_dict(),
            "window": self._window.to_dict(),
            "limits": None if self._limits is None else asdict(self._limits),
            "is_exceeded": self._is_exceeded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; limits that the run's spec gives replace measured ones.

        Raises: ValueError if the state has another form.
        """
        self.calibration = self.calibration.restore(state["calibration"])
        self._window = MismatchWindow.from_dict(state["window"])
        self._is_exceeded = bool(state["is_exceeded"])
        if self._given is None and state["limits"] is not None:
            self._set_limits(MismatchLimits(**state["limits"]))

    def _set_limits(self, limits: MismatchLimits) -> None:
        self._limits = limits
        self.calibration = replace(self.calibration, ceiling=limits.variance)
