"""What fresh tokens say: how far the engines are apart on policy, and which workers are at fault.

Every rank holds the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.health.fresh_tokens import MIN_FRESH_BLOCKS, FreshBlock
from vcpo.algo.health.mismatch_review import MismatchReview, largest_variance, review
from vcpo.api import VCPORunSpec
from vcpo_learner.update.fresh_tokens import wanted_fresh_tokens

_STATE = TypeAdapter(MismatchCalibration)


class Mismatch:
    """Calibration and review of a run, over one window of fresh blocks. Owner: the update."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self._is_ratio_given = spec.algorithm.on_policy_ess_ratio is not None
        self._limit_nats = spec.mismatch_limit_nats
        self.calibration = MismatchCalibration(ceiling=largest_variance(self._limit_nats))
        """Without the blocks of workers at fault."""

    @property
    def calibration_age_steps(self) -> int:
        return 0 if self._is_ratio_given else self.calibration.age_steps

    def wanted_fresh_tokens(self, num_blocks: int, batch_tokens: int) -> int:
        # A ratio that is given needs no calibration, but workers are compared at every step.
        wanted = MIN_FRESH_BLOCKS if self._is_ratio_given else self.calibration.wanted_count
        return wanted_fresh_tokens(wanted - num_blocks, batch_tokens)

    def observe(self, fresh: Sequence[FreshBlock]) -> MismatchReview:
        """Return what the window says with a step's fresh blocks; leave out workers at fault."""
        observed = self.calibration.observe(fresh)
        found = review(observed.blocks, self._limit_nats)
        self.calibration = observed.without([fault.worker for fault in found.at_fault])
        return found

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _STATE.dump_python(self.calibration)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ceiling = self.calibration.ceiling
        self.calibration = replace(_STATE.validate_python(state), ceiling=ceiling)
