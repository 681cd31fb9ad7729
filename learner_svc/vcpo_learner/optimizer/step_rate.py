"""The learning rates of a run's steps, before what the batch of a step and its health take off.

The rate is the set rate times two factors that count differently:

- The warm-up counts updates. It waits for the optimizer's moments, and a skipped step does not
  change them.
- The schedule counts the run's steps, skipped ones too. So it always ends at the last of `steps`,
  and a resumed run goes on where it was. A run whose `steps` was raised goes on along the longer
  course; its rate may rise at that moment.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from vcpo.algo.ess.trust_region import TARGET_BATCH, TrustRegion
from vcpo.algo.ess.unit import EssKind, EssReading
from vcpo.algo.ess.verdict import StepLimits
from vcpo.api import VCPORunSpec
from vcpo.api.learner import FINAL_LEARNING_RATE_RATIO, Optimizer, Schedule

_REGION = TypeAdapter(TrustRegion)


class StepRate:
    """The base rate of each step, and its share that the trust region allows.

    Owner: the tensor thread.
    """

    def __init__(self, spec: VCPORunSpec) -> None:
        self._settings = spec.optimizer
        self._total_steps = spec.steps
        self._updates_taken = 0
        self.region = spec.algorithm.trust_region
        """Bounds the rates; None when nothing does."""
        self._limits = spec.algorithm.step_limits

    def base(self, steps_taken: int) -> float:
        """Return the rate that optimizer and schedule set for the next step.

        steps_taken: steps before it, skipped ones included.
        """
        return base_learning_rate(
            self._settings,
            total_steps=self._total_steps,
            steps_taken=steps_taken,
            updates_taken=self._updates_taken,
        )

    def schedule(self, base_rate: float) -> float:
        return base_rate / self._settings.learning_rate

    def limits(self, surprisal_nats: float | None) -> StepLimits:
        """Return what bounds the next step, whose tokens have this mean of -log mu, if finite."""
        if self.region is None:
            return self._limits
        self.region = self.region.read(surprisal_nats)
        return replace(self._limits, target_ess_ratio=self.region.target)

    def observe(
        self, reading: EssReading, tokens_by_lag: Mapping[int, int], num_trajectories: int
    ) -> None:
        """Take in the batch of the next step, after its tokens (`limits`).

        tokens_by_lag: lags in policy versions.
        """
        if self.region is None:
            return
        missing_nats = math.log(reading.on_policy_ess_ratio / reading.ess_ratio)
        # Blocks are so many, and each so short, that size and mismatch hardly show in them.
        is_whole = reading.kind is EssKind.SEQUENCE
        size, mismatch_nats = (
            (num_trajectories, reading.mismatch_nats) if is_whole else (TARGET_BATCH, 0.0)
        )
        self.region = self.region.observe(
            missing_nats, tokens_by_lag, reading.chance_nats, size, mismatch_nats
        )

    def allowed_rate(self, base_rate: float) -> float:
        return base_rate if self.region is None else self.region.largest_rate(base_rate)

    def take(self, rate: float | None, allowed: float | None = None) -> None:
        """Take in a step.

        rate: at which it was taken; None if it was skipped.
        allowed: as `allowed_rate` returned it; None if the batch had no ESS ratio.
        """
        self._updates_taken += rate is not None
        if self.region is not None:
            self.region = self.region.step(rate or 0.0, allowed)

    def state_dict(self) -> dict[str, Any]:
        region = None if self.region is None else _REGION.dump_python(self.region)
        return {"updates_taken": self._updates_taken, "trust_region": region}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; without a region in it, the region starts anew."""
        self._updates_taken = int(state["updates_taken"])
        region = state["trust_region"]
        if self.region is not None and region is not None:
            self.region = self.region.continue_from(_REGION.validate_python(region))


def base_learning_rate(
    settings: Optimizer, *, total_steps: int, steps_taken: int, updates_taken: int
) -> float:
    """Return the base learning rate of the next step.

    total_steps: steps of the whole run.
    steps_taken: steps before this one, skipped ones included.
    updates_taken: those of them that changed the parameters.
    """
    rising = min(1.0, (updates_taken + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * rising * _schedule_ratio(settings, total_steps, steps_taken)


def _schedule_ratio(settings: Optimizer, total_steps: int, steps_taken: int) -> float:
    """Return the schedule's factor: 1 up to the step that ends the warm-up, least at the last."""
    whole_rate_step = max(1, settings.warmup_steps)
    falling_steps = total_steps - whole_rate_step
    if settings.schedule is Schedule.CONSTANT or falling_steps <= 0:
        return 1.0
    progress = min(1.0, max(0.0, (steps_taken + 1 - whole_rate_step) / falling_steps))
    if settings.schedule is Schedule.COSINE:
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 + (FINAL_LEARNING_RATE_RATIO - 1.0) * progress
