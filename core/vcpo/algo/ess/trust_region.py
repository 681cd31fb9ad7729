r"""Trust region on the drift over the lag: the rate at which data is still usable when it is used.

    e    nats that the ESS ratio misses, log(rho_on / rho)
    d    distance: the root of the sum of squared learning rates over the steps since a token was
         sampled, the mean over tokens

In runs e grows about as d does, e = a d, and d of H steps at the rate r is r sqrt(H), as of a
random walk. So data that is H steps old misses e* nats at

    r* = e* / (a sqrt(H)),      a = mean e / mean d,      e* = -max(1, h/h_0) log T.

Means are of e and of d apart, so that chance around e = 0 cancels; what chance alone explains of a
mean counts as 0. h is the surprisal of the tokens: the same nats are a smaller change of a policy
whose tokens are uncertain. docs/inside/mathematics.md has memory, start and size of the batch.

Source: this project's. The form follows trust regions in policy space (TRPO, arXiv 1502.05477).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from vcpo.algo.ess.finite_batch import nats_at_size

TARGET_ESS_RATIO: Final = 0.35
"""Share of the on-policy ESS ratio that data has left at the edge of the region."""

SURE_SURPRISAL_NATS: Final = 0.3
"""h_0: mean surprisal of a token, nats, up to which the target is T itself."""

LEAST_TARGET: Final = 0.05
"""Least share of the on-policy ESS ratio that uncertain tokens may have left, unless T is less."""

TARGET_BATCH: Final = 64
"""Number of weights of the batches to which the target applies."""

SHORT_STEPS: Final = 10
"""Steps of the short means; the long ones are over the horizon, if that is longer."""

LEAST_HORIZON_STEPS: Final = 32
"""Horizon of runs with less lag, but some. At little lag the noise of the steps is a closer limit
than staleness, and the same distance keeps both."""

PEAK_STEPS: Final = 10_000
"""Steps over which the largest drift fades to 1/e of itself, so that no freak lasts for ever."""

GROWTH: Final = 2.0
"""Most by which the rate rises from one step that is taken to the next."""

SMALLEST_SCALE: Final = 1 / 64
"""Least share of the base rate. Nats that persist below it have another cause than drift."""


def horizon_of_lag(lag_steps: int) -> int:
    """Return the horizon of a run whose tokens are at most so old, in steps; 0 for no lag."""
    return max(lag_steps, LEAST_HORIZON_STEPS) if lag_steps > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftMeans:
    """Running means of what batches miss and how far away they were sampled; immutable."""

    steps: int
    """Number of steps over which they run, at least 1: the weight of the newest is 1 / steps."""

    missing_nats: float = 0.0
    """Mean of e, nats."""

    distance: float = 0.0
    """Mean of d, at least 0."""

    inverse_root_size: float = TARGET_BATCH**-0.5
    """Mean of 1/sqrt(N), in (0, 1]: about as this is what a batch of N lacks, near the target."""

    mismatch_nats: float = 0.0
    """Mean of -log rho_on, nats, at least 0."""

    def observe(
        self, missing_nats: float, distance: float, num_weights: int, mismatch_nats: float
    ) -> Self:
        """Return the means after one more batch, the first of which gives size and mismatch."""
        share = 1.0 / self.steps
        of_kind = share if self.distance > 0.0 else 1.0
        return replace(
            self,
            missing_nats=_nearer(self.missing_nats, missing_nats, share),
            distance=_nearer(self.distance, distance, share),
            inverse_root_size=_nearer(self.inverse_root_size, num_weights**-0.5, of_kind),
            mismatch_nats=_nearer(self.mismatch_nats, mismatch_nats, of_kind),
        )

    def drift(self, chance_nats: float) -> float:
        """Return a, nats per unit of distance, at least 0, as batches of `TARGET_BATCH` have it.

        chance_nats: how far chance lowers log rho of a single batch, nats, at least 0. The mean of
            n independent batches scatters by 1/sqrt(n) of it; here n = 2 steps - 1.
        """
        reach = chance_nats / math.sqrt(2 * self.steps - 1)
        nats = self.missing_nats
        drifted = nats if nats >= 2.0 * reach else 2.0 * (nats - reach)
        if drifted <= 0.0 or self.distance == 0.0:
            return 0.0
        size = max(1, round(self.inverse_root_size**-2))
        return nats_at_size(drifted, size, TARGET_BATCH, self.mismatch_nats) / self.distance


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """What a run has seen of its drift, and the rate that this allows; immutable."""

    horizon_steps: int
    """H, the age in steps at which data is to be usable; at least 0, which is no region."""

    target_ess_ratio: float = TARGET_ESS_RATIO
    """T, the share of the on-policy ESS ratio that data of that age keeps, in (0, 1)."""

    sure_surprisal_nats: float = SURE_SURPRISAL_NATS
    """h_0, nats per token, above 0; infinity keeps the target at T."""

    surprisal_nats: float | None = None
    """h, the mean over the short steps of -log mu per token; None before the first batch."""

    squared_rates: tuple[float, ...] = ()
    """Squared learning rates of the last steps, at most H of them, oldest first; 0 for a skipped
    step."""

    means: tuple[DriftMeans, ...] = ()
    """The short and the long means; empty before the first batch."""

    drift: float = 0.0
    """a, nats per unit of distance, as the short means or the peak have it; at least 0."""

    peak: float = 0.0
    """Largest a of the long means, faded; nats per unit of distance, at least 0."""

    bound: float | None = None
    """Largest rate that the region allowed to the last step that was taken, at least 0; None before
    the first."""

    start: float = 0.0
    """Rate of the horizon by the newest batch alone, at least 0; 0 once the horizon is full."""

    @property
    def target(self) -> float:
        """Share of the on-policy ESS ratio that data of the horizon keeps now, in (0, 1)."""
        power = max(1.0, (self.surprisal_nats or 0.0) / self.sure_surprisal_nats)
        least = min(self.target_ess_ratio, LEAST_TARGET)
        return max(least, math.pow(self.target_ess_ratio, power))

    def read(self, surprisal_nats: float | None) -> Self:
        """Return the region after the tokens of one more batch.

        surprisal_nats: mean of -log mu per token; None and what is not finite leave h as it is.
        """
        if surprisal_nats is None or not math.isfinite(surprisal_nats) or self.horizon_steps == 0:
            return self
        before = surprisal_nats if self.surprisal_nats is None else self.surprisal_nats
        return replace(self, surprisal_nats=_nearer(before, surprisal_nats, 1.0 / SHORT_STEPS))

    def observe(
        self,
        missing_nats: float,
        tokens_by_lag: Mapping[int, int],
        chance_nats: float = 0.0,
        num_weights: int = TARGET_BATCH,
        mismatch_nats: float = 0.0,
    ) -> Self:
        """Return the region after it has seen one more batch.

        Fresh data shows no drift: what it misses is mismatch that the calibration does not know. So
        it does not count, and neither does a batch before the policy has moved.

        missing_nats: log(rho_on / rho) of the batch, nats, finite; below 0 by chance.
        tokens_by_lag: number of tokens of each lag, in steps; at least one token. The steps that
            are not remembered count as none.
        chance_nats: how far chance lowers log rho of a single batch, nats, at least 0.
        num_weights: of the batch, at least 1.
        mismatch_nats: -log of its rho_on as that of an infinite batch, at least 0.
        """
        if self.horizon_steps == 0:
            return self
        distances = self._distances(max(tokens_by_lag))
        total = sum(tokens_by_lag.values())
        distance = sum(distances[lag] * count for lag, count in tokens_by_lag.items()) / total
        if distance == 0.0:
            return self
        before = self.means or tuple(DriftMeans(steps=steps) for steps in self._spans)
        short, long = means = tuple(
            each.observe(missing_nats, distance, num_weights, mismatch_nats) for each in before
        )
        peak, start = self.peak, 0.0
        if len(self.squared_rates) < self.horizon_steps:
            # A near batch: its nats grow as d^2. Chance counts as drift, so luck allows no jump. An
            # early drift stays, so uncertain tokens allow none either.
            near = replace(short, missing_nats=missing_nats + 2.0 * chance_nats, distance=distance)
            if (read := near.drift(0.0)) > 0.0:
                allowed_nats = -math.log(self.target_ess_ratio)
                start = math.sqrt(allowed_nats * distance / (read * self.horizon_steps))
        else:
            peak = max(peak * (1.0 - 1.0 / PEAK_STEPS), long.drift(chance_nats))
        drift = max(short.drift(chance_nats), peak)
        return replace(self, means=means, peak=peak, drift=drift, start=start)

    def largest_rate(self, base_rate: float) -> float:
        """Return the learning rate that the region allows to the next step, in [0, base_rate].

        base_rate: of the optimizer's settings and schedule, at least 0.
        """
        if self.horizon_steps == 0:
            return base_rate
        rate = base_rate / self.horizon_steps if self.bound is None else GROWTH * self.bound
        rate = max(rate, self.start)
        if self.drift > 0.0:
            allowed_nats = -math.log(self.target)
            rate = min(rate, allowed_nats / (self.drift * math.sqrt(self.horizon_steps)))
        return min(base_rate, max(rate, SMALLEST_SCALE * base_rate))

    def step(self, rate: float, bound: float | None = None) -> Self:
        """Return the region after a step.

        rate: at which the step was taken, 0 if it was skipped; it may be below the bound. A policy
            that has not moved yet shows no drift: skipped steps do not end the start.
        bound: as `largest_rate` returned it; None if the batch had no ESS ratio.
        """
        if self.horizon_steps == 0:
            return self
        if rate == 0.0 and not self.squared_rates:
            return replace(self, means=(), drift=0.0)
        kept = (*self.squared_rates, rate * rate)
        first = max(0, len(kept) - self.horizon_steps)
        is_new = rate > 0.0 and bound is not None
        return replace(self, squared_rates=kept[first:], bound=bound if is_new else self.bound)

    def continue_from(self, saved: "TrustRegion") -> Self:
        kept = saved.squared_rates
        means = zip(self._spans, saved.means, strict=False)
        return replace(
            self,
            squared_rates=kept[max(0, len(kept) - self.horizon_steps) :],
            means=tuple(replace(each, steps=steps) for steps, each in means),
            drift=saved.drift,
            peak=saved.peak,
            bound=saved.bound,
            start=saved.start,
            surprisal_nats=saved.surprisal_nats,
        )

    @property
    def _spans(self) -> tuple[int, int]:
        return SHORT_STEPS, max(SHORT_STEPS, self.horizon_steps)

    def _distances(self, longest_lag: int) -> list[float]:
        """Return d of a token by its lag, [longest_lag + 1], from lag 0 on."""
        squares = [0.0]
        for age in range(1, longest_lag + 1):
            is_known = age <= len(self.squared_rates)
            squares.append(squares[-1] + (self.squared_rates[-age] if is_known else 0.0))
        return [math.sqrt(each) for each in squares]


def _nearer(mean: float, value: float, share: float) -> float:
    return (1.0 - share) * mean + share * value
