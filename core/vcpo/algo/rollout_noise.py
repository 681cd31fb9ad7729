"""Schedule of the noise on the normalization weights of a rollout policy.

A run is divided into K equal stages. The first stage has no noise. Over the others the standard
deviation falls geometrically from s0 to sK:

    sigma_j = s0 (sK / s0)^(j / (K - 2)),    j = 0 .. K - 2.

Noise adds no bias, but lowers the ESS ratio at lag 0, by as much as the stage demands
(`vcpo.algo.ess.calibration`).

Source: QeRL, arXiv 2510.11696, adaptive quantization noise; the exponent as in its code.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """Standard deviation of the noise at each step of a run."""

    initial_sigma: float
    """Standard deviation of the first stage with noise, above 0."""
    final_sigma: float
    """Standard deviation of the last stage, above 0."""
    num_stages: int
    """Number of stages, at least 3: one without noise and two with noise."""
    total_steps: int
    """Optimizer steps of the run, at least 1."""

    def sigma(self, step: int) -> float:
        """Return the standard deviation at a step counted from 0; steps past the end keep it."""
        stage = min(self.num_stages - 1, step * self.num_stages // self.total_steps)
        if stage == 0:
            return 0.0
        share = (stage - 1) / (self.num_stages - 2)
        return self.initial_sigma * math.pow(self.final_sigma / self.initial_sigma, share)
