"""A control of studies: a trust region that looks at the first steps only, and holds its rate.

If a run does as well with it, the region calibrates a constant rate and controls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from vcpo.algo.ess.trust_region import TrustRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRegion(TrustRegion):
    """A trust region until a step, and from there on the rate that it allowed to that step."""

    held_at_step: int
    """The last step that the region looks at, at least 1."""
    steps: int = 0
    """Steps of the run so far, the skipped ones too."""

    @classmethod
    def of(cls, region: TrustRegion, held_at_step: int) -> Self:
        observed = {each.name: getattr(region, each.name) for each in fields(TrustRegion)}
        return cls(held_at_step=held_at_step, **observed)

    def observe(self, *batch: Any, **more: Any) -> Self:
        """Return the region after one more batch; a held one has not looked."""
        if self._is_held:
            return self
        # With slots the decorator makes another class, of which `super()` does not know.
        return TrustRegion.observe(self, *batch, **more)

    def largest_rate(self, base_rate: float) -> float:
        """Return the rate that is allowed to the next step, in [0, base_rate]."""
        if self._is_held and self.bound is not None:
            return min(base_rate, self.bound)
        return TrustRegion.largest_rate(self, base_rate)

    def step(self, rate: float, bound: float | None = None) -> Self:
        return replace(TrustRegion.step(self, rate, bound), steps=self.steps + 1)

    @property
    def _is_held(self) -> bool:
        return self.steps >= self.held_at_step
