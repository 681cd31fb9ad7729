r"""Whether a step is taken, and at which part of the learning rate.

`learning_rate_scale` damps and cannot refuse: rho >= 1/B keeps its square root above B^(-1/2). Two
additions make it a whole rule.

*Dead band.* rho scatters around rho_on, on policy too, and min(1, .) takes every low throw and no
high one: a part of the learning rate is gone for nothing, 1 % of it in large batches and 10 % in
small ones. The band is therefore as wide as chance reaches in a batch of this size (`ess_unit`),
and is left behind by what chance does not explain: with x = log rho / rho_on and c the reach,

    log scale = 0             for x >= -c
                2 p (x + c)   for -2c <= x <= -c
                p x           for x <= -2c,

the firm threshold, which neither jumps nor holds the rate of a stale batch up for good. A band of a
width d that is given moves the reference to (1 - d) rho_on for every batch; 0 is the rule as
published.

*Refusal.* Optimizers divide by a running mean of squares. A gradient G times the usual one that is
let in at any learning rate, however small, stays in that mean with a share (1 - beta2) G^2 and
slows the steps after it down, and its direction goes on in the first moment. A refused step leaves
parameters, moments and warm-up as they are. So what is not worth a step at all is refused rather
than damped: what is not a number, and a batch that has lost all but `refuse_below` of what it has
on policy. The design note 021 has the figures.

Sources: VCPO, arXiv 2602.17616, Eq. 5 (the scale); Gao and Bruce, "WaveShrink with firm shrinkage"
(1997), for the threshold. That its width follows the batch, and refusal, are this project's.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from vcpo.algo.arrays import Scalar
from vcpo.algo.ess.learning_rate import LearningRateRule, learning_rate_scale


class RefusalReason(StrEnum):
    """Why a step is not taken."""

    NON_FINITE = "non_finite"
    """The ESS ratio, the divergence or the gradient norm is not a number."""
    LOW_ESS = "low_ess"
    """Too little is left of the batch, against one on policy."""
    HIGH_DIVERGENCE = "high_divergence"
    """Learner and sampler are too far apart, per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a batch must be like for a step, and for a whole one."""

    rule: LearningRateRule = LearningRateRule.SQRT
    """How the step shrinks with the ESS ratio."""

    dead_band: float | None = None
    """Part of the on-policy ESS ratio, in [0, 1), that may be missing without any damping; 0 is the
    rule as published, None follows what chance does to a batch of its size."""

    refuse_below: float = 0.0
    """Part of the on-policy ESS ratio, in [0, 1), below which a step is refused; 0 refuses none."""

    refuse_kl_above: float = math.inf
    """KL divergence from sampler to learner, nats per token, above which a step is refused."""

    def __post_init__(self) -> None:
        for name in ("dead_band", "refuse_below"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}: give a part of the on-policy ratio in [0, 1)")
        if not self.refuse_kl_above > 0.0:
            raise ValueError(f"refuse_kl_above is {self.refuse_kl_above}: give nats above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What becomes of one step."""

    scale: float
    """Factor on the base learning rate, in [0, 1]; 0 when the step is refused."""

    refusal: RefusalReason | None = None
    """Why the step is refused; None when it is taken."""

    @property
    def is_taken(self) -> bool:
        """Whether the optimizer may step; if not, its moments stay as they are."""
        return self.refusal is None


def judge_step(
    ess_ratio: Scalar,
    on_policy_ess_ratio: Scalar,
    limits: StepLimits,
    *,
    chance_nats: Scalar = 0.0,
    kl_per_token: Scalar | None = None,
    gradient_norm: Scalar | None = None,
) -> StepVerdict:
    """Take a step at a part of the learning rate, or refuse it.

    ess_ratio: rho of the batch before truncation, in (0, 1]; NaN refuses the step.
    on_policy_ess_ratio: rho of the same lengths on policy, in (0, 1].
    chance_nats: how far below it chance alone takes log rho, at least 0.
    kl_per_token: nats; gradient_norm: before clipping; None for what is not known.
    Raises: ValueError when a ratio that is a number lies outside (0, 1].
    """
    ess_ratio, on_policy_ess_ratio = float(ess_ratio), float(on_policy_ess_ratio)
    kl_per_token = None if kl_per_token is None else float(kl_per_token)
    numbers = (ess_ratio, kl_per_token, gradient_norm)
    if not all(number is None or math.isfinite(number) for number in numbers):
        return StepVerdict(scale=0.0, refusal=RefusalReason.NON_FINITE)
    reference = on_policy_ess_ratio * (1.0 - (limits.dead_band or 0.0))
    scale = learning_rate_scale(ess_ratio, reference, limits.rule)
    if limits.dead_band is None:
        left = _beyond_chance(ess_ratio, on_policy_ess_ratio, float(chance_nats))
        scale = learning_rate_scale(left, on_policy_ess_ratio, limits.rule)
    if ess_ratio < limits.refuse_below * on_policy_ess_ratio:
        return StepVerdict(scale=0.0, refusal=RefusalReason.LOW_ESS)
    if kl_per_token is not None and kl_per_token > limits.refuse_kl_above:
        return StepVerdict(scale=0.0, refusal=RefusalReason.HIGH_DIVERGENCE)
    return StepVerdict(scale=scale)


def _beyond_chance(ess_ratio: float, on_policy_ess_ratio: float, chance_nats: float) -> float:
    """ESS ratio with what chance explains given back, in (0, 1]: the firm threshold."""
    missing_nats = math.log(on_policy_ess_ratio / ess_ratio)
    if missing_nats >= 2.0 * chance_nats:
        return ess_ratio
    return on_policy_ess_ratio * math.exp(-2.0 * max(0.0, missing_nats - chance_nats))
