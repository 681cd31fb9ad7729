r"""Learning rate of one step, from the ESS ratio of its batch.

The rule compares the batch with an on-policy batch of the same lengths:

    lr = base_lr * min(1, rho / rho_on)^p,    p = 1/2 (sqrt), 1 (linear), 0 (none).

A batch with ESS ratio rho has the gradient noise of a batch of rho * B trajectories. The rule
therefore applies batch-size scaling: sqrt suits optimizers that divide by a running root mean
square, such as AdamW; linear suits SGD. Scaling the loss instead has no effect under AdamW, which
divides out a constant factor. Decoupled weight decay shrinks with the learning rate.

Limit: rho >= 1/B bounds the scale from below, so the rule damps a step; `verdict` refuses steps.

Source: VCPO, arXiv 2602.17616, Eq. 5.
Departure from the released reference: a ratio that is NaN raises; in the release min(1, NaN) is 1.
"""

import math
from enum import StrEnum

from vcpo.algo.arrays import Scalar


class LearningRateRule(StrEnum):
    """How the learning rate follows the ESS ratio."""

    SQRT = "sqrt"
    """p = 1/2."""
    LINEAR = "linear"
    """p = 1."""
    NONE = "none"
    """p = 0."""
    TRUST_REGION = "trustRegion"
    """p = 1/2 below the region's target, at the rate that `trust_region` allows."""


def learning_rate_scale(
    ess_ratio: Scalar,
    on_policy_ess_ratio: Scalar = 1.0,
    rule: LearningRateRule = LearningRateRule.SQRT,
) -> float:
    """Return the factor on the base learning rate for one optimizer step.

    ess_ratio: rho of the step's whole batch before truncation, in (0, 1].
    on_policy_ess_ratio: rho_on of the same lengths, in (0, 1].
    Returns a value in (0, 1]; 1 if rho is at least rho_on.
    Source: VCPO, arXiv 2602.17616, Eq. 5.
    """
    ess_ratio, on_policy_ess_ratio = float(ess_ratio), float(on_policy_ess_ratio)
    _require_ratio("ess_ratio", ess_ratio)
    _require_ratio("on_policy_ess_ratio", on_policy_ess_ratio)
    remaining = min(1.0, ess_ratio / on_policy_ess_ratio)
    match rule:
        case LearningRateRule.SQRT | LearningRateRule.TRUST_REGION:
            return math.sqrt(remaining)
        case LearningRateRule.LINEAR:
            return remaining
        case LearningRateRule.NONE:
            return 1.0


def _require_ratio(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} is {value}: an ESS ratio lies in (0, 1]")
