"""Workers whose mismatch is a fault of their own, judged by what their fresh tokens show.

Rounding differs between engines, and the calibration takes what it costs out of the learning-rate
rule. A worker with another temperature, another number format or masked logits differs by more. Its
log-probabilities are not those of the policy that sampled, so its importance weights are wrong and
no calibration may take them for normal. Such a worker is at fault if its own variance per token is

    far above that of the median worker, and above what the formats of the run explain, or
    above `MISMATCH_CEILING`, which no format explains.

If all workers are above the ceiling, none is at fault alone: the engines disagree.
"""

import math
from dataclasses import dataclass
from typing import Final

from vcpo.algo.ess.calibration import MISMATCH_CEILING, MismatchCalibration
from vcpo.algo.ess.worker_blocks import FreshSums

_FAULT_COUNT: Final = 64
"""Blocks from which a worker is judged: its variance is known to 18 %."""

_DEVIATIONS: Final = 3.0
"""Standard errors by which a worker's variance must exceed a limit."""

_FAR_ABOVE: Final = 4.0
"""Factor on the median worker's variance: twice its deviation."""

_VARIANCE_PER_SQUARED_GAP: Final = 4.0
"""Variance of a token's log ratio over its squared mean size. 1.6 for a normal law; 2 to 6.5 were
measured, because most tokens agree and a few do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFault:
    """A worker whose log-probabilities are not those of the policy that it samples from."""

    worker: str
    """Its name."""

    variance_per_token: float
    """Of its log ratios to the learner at equal versions, nats^2."""

    limit: float
    """That it exceeds, nats^2 per token."""

    count: int
    """Blocks that show it."""

    @property
    def message(self) -> str:
        """What the worker did and what to look at, as a clause."""
        return (
            f"it differs from the learner by {self.variance_per_token:.2g} nats^2 per token at"
            f" equal versions, over {self.count} blocks of tokens, where at most {self.limit:.2g}"
            " is explained; compare its temperature, its precision, its quantization and its masked"
            " logits with those of the other workers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReview:
    """What the fresh tokens say of the workers after a step."""

    at_fault: tuple[MismatchFault, ...] = ()
    """Workers at fault, in the order in which they were seen last."""

    engines_disagree: bool = False
    """Whether every worker is above `MISMATCH_CEILING`."""


def explained_variance(limit_nats: float) -> float:
    """Return the largest s2 that the formats of a run explain, nats^2 per token.

    limit_nats: largest expected mean of |log pi - log mu|, nats per token, as the audit has it.
    """
    return min(_VARIANCE_PER_SQUARED_GAP * limit_nats**2, MISMATCH_CEILING)


def review_mismatch(calibration: MismatchCalibration, *, explained: float) -> MismatchReview:
    """Return which workers are at fault, after `MismatchCalibration.observe`.

    explained: as `explained_variance` returns it.
    """
    judged = {
        name: pool
        for name, seen in calibration.workers.items()
        if (pool := seen.newest_blocks(_FAULT_COUNT)) is not None
    }
    if judged and all(_least(pool) > MISMATCH_CEILING for pool in judged.values()):
        return MismatchReview(engines_disagree=2 * len(judged) > len(calibration.workers))
    usual = calibration.estimate
    limit = MISMATCH_CEILING
    if usual is not None:
        limit = min(MISMATCH_CEILING, max(explained, _FAR_ABOVE * usual.variance_per_token))
    return MismatchReview(
        at_fault=tuple(
            MismatchFault(
                worker=name,
                variance_per_token=pool.variance_per_token,
                limit=limit,
                count=pool.count,
            )
            for name, pool in judged.items()
            if _least(pool) > limit
        )
    )


def _least(pool: FreshSums) -> float:
    """Return the least variance per token that the blocks leave possible."""
    return pool.variance_per_token * (1.0 - _DEVIATIONS * math.sqrt(2.0 / pool.count))
