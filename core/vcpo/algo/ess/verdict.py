r"""Decision on a step: refuse it, or take it at a share of the learning rate.

`learning_rate_scale` damps a step and cannot refuse it: because rho >= 1/B, its square root stays
above B^(-1/2). Two additions complete the rule.

*Dead band.* rho scatters around rho_on, on policy as well. min(1, .) counts every low value and no
high one, so chance alone costs learning rate: 1 % of it in large batches and 10 % in small ones.
The dead band is therefore as wide as chance reaches in a batch of this size (see `unit`). What
chance does not explain is damped. With x = log(rho / rho_on) and c the reach of chance in nats,

    log scale = 0             for x >= -c
                2 p (x + c)   for -2c <= x <= -c
                p x           for x <= -2c,

which is firm thresholding: the scale has no jump, and a stale batch keeps no advantage from the
band. A given band width d moves the reference to (1 - d) rho_on for every batch; 0 is the rule as
published. Under a trust region x counts from its target, target_ess_ratio times rho_on.

*Refusal.* A refused step changes neither parameters nor warm-up nor moments, which a huge gradient
bends at any rate. Refused are a step with a number that is not finite, and a batch whose ESS ratio
is below `refuse_below` times the on-policy ratio.

Sources: VCPO, arXiv 2602.17616, Eq. 5 (the scale); Gao and Bruce, "WaveShrink with firm shrinkage"
(1997), for the threshold. That its width follows the batch, and refusal, are this project's.
"""

import math
from dataclasses import dataclass
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

        lr = base_lr * min(1, rho / rho_on)^p,    p = 1/2 (sqrt), 1 (linear), 0 (none).

    A batch with ESS ratio rho has the gradient noise of a batch of rho * B trajectories. The rule
    therefore applies batch-size scaling: sqrt suits optimizers that divide by a running root mean
    square, such as AdamW; linear suits SGD. Scaling the loss instead has no effect under AdamW,
    which divides out a constant factor. Decoupled weight decay shrinks with the learning rate.
    Departure from the released reference: a ratio that is NaN raises; there min(1, NaN) is 1.

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


class RefusalReason(StrEnum):
    """Why a step is refused."""

    NON_FINITE = "non_finite"
    """The ESS ratio, the KL divergence or the gradient norm is NaN or infinite."""
    LOW_ESS = "low_ess"
    """The ESS ratio is too low, compared with the on-policy ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits that decide whether a step is damped or refused."""

    rule: LearningRateRule = LearningRateRule.SQRT
    """How the learning rate follows the ESS ratio."""

    target_ess_ratio: float = 1.0
    """Share of the on-policy ESS ratio, in (0, 1], that a batch needs for the full rate."""

    refuse_below: float = 0.0
    """Share of the on-policy ESS ratio, in [0, 1), below which a step is refused; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """Decision on one step."""

    scale: float
    """Factor on the base learning rate, in [0, 1]; 0 if the step is refused."""

    refusal: RefusalReason | None = None
    """Why the step is refused; None if it is taken."""


def judge_step(
    ess_ratio: Scalar,
    on_policy_ess_ratio: Scalar,
    limits: StepLimits,
    *,
    chance_nats: Scalar = 0.0,
    kl_per_token: Scalar | None = None,
    gradient_norm: Scalar | None = None,
) -> StepVerdict:
    """Decide whether a step is taken, and at which share of the learning rate.

    ess_ratio: rho of the batch before truncation, in (0, 1]; NaN refuses the step.
    on_policy_ess_ratio: rho_on of the same lengths, in (0, 1].
    chance_nats: c, how far chance alone lowers log rho below log rho_on, nats, at least 0.
    kl_per_token: KL(behavior || target), nats; None if unknown.
    gradient_norm: before clipping; None if unknown.
    """
    ess_ratio, on_policy_ess_ratio = float(ess_ratio), float(on_policy_ess_ratio)
    kl_per_token = None if kl_per_token is None else float(kl_per_token)
    numbers = (ess_ratio, kl_per_token, gradient_norm)
    if not all(number is None or math.isfinite(number) for number in numbers):
        return StepVerdict(scale=0.0, refusal=RefusalReason.NON_FINITE)
    whole = on_policy_ess_ratio * limits.target_ess_ratio
    left = _beyond_chance(ess_ratio, whole, float(chance_nats))
    scale = learning_rate_scale(left, whole, limits.rule)
    if ess_ratio < limits.refuse_below * on_policy_ess_ratio:
        return StepVerdict(scale=0.0, refusal=RefusalReason.LOW_ESS)
    return StepVerdict(scale=scale)


def _beyond_chance(ess_ratio: float, on_policy_ess_ratio: float, chance_nats: float) -> float:
    """Return the ESS ratio without the loss that chance explains, in (0, 1] (firm threshold)."""
    missing_nats = math.log(on_policy_ess_ratio / ess_ratio)
    if missing_nats >= 2.0 * chance_nats:
        return ess_ratio
    return on_policy_ess_ratio * math.exp(-2.0 * max(0.0, missing_nats - chance_nats))
