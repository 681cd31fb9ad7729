r"""Learning rate of one step, from how much of its batch is in effect.

The step is damped by what the batch has lost against a batch of the same lengths sampled on policy:

    lr = base_lr * min(1, rho / rho_on)^p,    p = 1/2 (sqrt), 1 (linear), 0 (none).

A batch of rho * B equal trajectories has the gradient noise of a batch that much smaller. The rule
thus carries batch-size scaling over to it: sqrt suits optimizers that divide by a running root mean
square, such as AdamW; linear suits SGD. Scaling the loss instead would do nothing under
AdamW, which divides a constant factor out again; decoupled weight decay shrinks with the rate.

rho_on, and not 1, is the reference: training and inference engines disagree a little on every
token, so that even fresh trajectories have rho < 1 (see `calibration`).

Limits: rho >= 1/B bounds the scale from below by B^(-1/2) under sqrt, so the rule damps and cannot
refuse a step. What must be refused raises before it gets here (see `weights`).

Source: VCPO, arXiv 2602.17616, Eq. 5.
Departure from the released reference: a ratio that is NaN raises; there min(1, NaN) gives 1.
"""

import math
from enum import StrEnum

from vcpo.algo.arrays import Scalar


class LearningRateRule(StrEnum):
    """How the learning rate follows the ESS ratio."""

    SQRT = "sqrt"
    LINEAR = "linear"
    NONE = "none"


def learning_rate_scale(
    ess_ratio: Scalar,
    on_policy_ess_ratio: Scalar = 1.0,
    rule: LearningRateRule = LearningRateRule.SQRT,
) -> float:
    """Factor on the base learning rate for one optimizer step.

    ess_ratio: rho of the step's whole batch before truncation, in (0, 1].
    on_policy_ess_ratio: rho of the same lengths sampled on policy, in (0, 1].
    Returns a value in (0, 1]; 1 when the batch is as effective as an on-policy one or more so.
    Raises: ValueError when a ratio is NaN or outside (0, 1].
    Source: VCPO, arXiv 2602.17616, Eq. 5.
    """
    ess_ratio, on_policy_ess_ratio = float(ess_ratio), float(on_policy_ess_ratio)
    _require_ratio("ess_ratio", ess_ratio)
    _require_ratio("on_policy_ess_ratio", on_policy_ess_ratio)
    remaining = min(1.0, ess_ratio / on_policy_ess_ratio)
    match rule:
        case LearningRateRule.SQRT:
            return math.sqrt(remaining)
        case LearningRateRule.LINEAR:
            return remaining
        case LearningRateRule.NONE:
            return 1.0


def _require_ratio(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} is {value}: an ESS ratio lies in (0, 1]")
