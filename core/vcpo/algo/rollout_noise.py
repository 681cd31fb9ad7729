"""How much noise a rollout policy's norm weights carry, stage by stage.

A run is cut into K equal stages. The first has none; the others go down geometrically,

    sigma_j = s0 (sK / s0)^(j / (K - 2)),    j = 0 .. K - 2,

from s0 in the second to sK in the last. Noise makes the sampler more random where it is undecided;
the log-probabilities that it reports are those of the noisy policy, so nothing is biased by it, but
the ESS ratio at lag 0 is below 1 by as much as the stage asks for (`vcpo.algo.ess.calibration`).

Source: QeRL, arXiv 2510.11696, adaptive quantization noise; the exponent as in its code (NVlabs,
trl_trainer/noise_scheduler.py), which differs from the paper's summaries.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """Standard deviations over a run of a known length."""

    initial_sigma: float
    """Of the first stage that has noise, above 0."""
    final_sigma: float
    """Of the last stage, above 0."""
    num_stages: int
    """Stages, at least 3: one without noise and two to go down between."""
    total_steps: int
    """Optimizer steps of the run, at least 1."""

    def __post_init__(self) -> None:
        for field in ("initial_sigma", "final_sigma"):
            if not 0.0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}: give a number above 0")
        if self.num_stages < 3 or self.total_steps < 1:
            raise ValueError(
                f"num_stages is {self.num_stages} and total_steps {self.total_steps}: "
                "give at least 3 and 1"
            )

    def sigma(self, step: int) -> float:
        """Standard deviation at a step, counted from 0; a step beyond the last counts as it."""
        stage = min(self.num_stages - 1, step * self.num_stages // self.total_steps)
        if stage == 0:
            return 0.0
        share = (stage - 1) / (self.num_stages - 2)
        return self.initial_sigma * math.pow(self.final_sigma / self.initial_sigma, share)
