"""The learning rate that a step was taken at, and the factors that make it.

    rate = optimizer.learningRate x schedule x scale x backoff

Records, metrics, signals and everything that shows a run hold these four numbers, so that all of
them show one rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveRate:
    """The learning rate of one step."""

    rate: float
    schedule: float
    """Factor of warm-up and schedule, in [0, 1]."""
    scale: float
    """Factor of the ESS, or of the trust region, in [0, 1]."""
    backoff: float
    """Factor that warnings and rollbacks before the step have left, in (0, 1]."""

    @property
    def share(self) -> float:
        return self.schedule * self.scale * self.backoff

    def __str__(self) -> str:
        named = {"schedule": self.schedule, "scale": self.scale, "backoff": self.backoff}
        factors = [f"{name} x{factor:.2g}" for name, factor in named.items() if factor != 1.0]
        return f"{self.rate:.3g} ({', '.join(factors) or 'full rate'})"
