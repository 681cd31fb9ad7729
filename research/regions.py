"""A candidate for the trust region: uncertain tokens may miss more.

    allowed nats = min(-log 0.05, e* max(1, h / 0.3))

h is the mean over ten steps of -log mu per token, nats. A change of the logits moves sure tokens
less than uncertain ones, so the same nats are a smaller change where tokens are uncertain.

Source: this project's; thresholds of tokens that scale with entropy are of arXiv 2607.22186.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from vcpo.algo.ess.trust_region import SHORT_STEPS, TrustRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class SurprisalRegion(TrustRegion):
    """A trust region that is told how uncertain the tokens of each batch are."""

    surprisal_nats: float | None = None
    """h; None before the first batch."""

    @classmethod
    def of(cls, region: TrustRegion) -> Self:
        return cls(**{each.name: getattr(region, each.name) for each in fields(TrustRegion)})

    def read(self, surprisal_nats: float) -> Self:
        """Return the region after the mean surprisal of one more batch, nats per token."""
        before = surprisal_nats if self.surprisal_nats is None else self.surprisal_nats
        return replace(self, surprisal_nats=before + (surprisal_nats - before) / SHORT_STEPS)

    def largest_rate(self, base_rate: float) -> float:
        """Return the rate that is allowed to the next step, in [0, base_rate]."""
        target = self.target_ess_ratio ** max(1.0, (self.surprisal_nats or 0.0) / 0.3)
        # With slots the decorator makes another class, of which `super()` does not know.
        return TrustRegion.largest_rate(
            replace(self, target_ess_ratio=max(0.05, target)), base_rate
        )
