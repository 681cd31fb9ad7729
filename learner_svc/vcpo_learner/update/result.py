"""What one update did, in plain numbers."""

from dataclasses import dataclass, field
from enum import StrEnum

from vcpo.algo import BatchDiagnostics, EssKind, FreshTokens, LagBucket, WarningLevel


class SkipReason(StrEnum):
    """Why a step was not taken."""

    NON_FINITE_WEIGHT = "non_finite_weight"
    """An importance weight or a gradient norm is not a number, or every weight is 0."""
    NON_FINITE_GRADIENT = "non_finite_gradient"
    """The gradient or its norm is not a number."""
    LOW_ESS = "low_ess"
    """Less is left of the batch than `refuseBelow` allows."""
    HIGH_DIVERGENCE = "high_divergence"
    """Learner and sampler are further apart than `refuseKlAbove` allows."""
    NO_GRADIENT = "no_gradient"
    """No trajectory says anything, as when the rewards of every prompt are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one step did, and the signals it went by. Scalars are always finite."""

    reward_mean: float
    """Mean reward of the batch's trajectories."""
    response_tokens_mean: float
    """Mean length of the responses, in tokens."""
    log_weights: tuple[float, ...] = ()
    """Log importance weights, nats, untruncated, the groups one after another; -inf is a weight of
    0. Empty when one has no value."""
    importance_weight_max: float = 0.0
    """Largest weight before truncation, at most the largest float; 0 when one has no value."""
    ess_ratio: float = 0.0
    """Effective sample size over batch size, before truncation, at the length at which it is read;
    0 when a weight has no value."""
    on_policy_ess_ratio: float
    """What the ratio is at lag 0, given or calibrated, in (0, 1]."""
    ess_kind: EssKind = EssKind.SEQUENCE
    """The length at which the ratios are read."""
    diagnostics: BatchDiagnostics | None = None
    """Numbers to look at; None when a weight has no value."""
    fresh: FreshTokens = field(default_factory=FreshTokens)
    """Tokens, of the batch and beside it, that were scored with the version that sampled them."""
    calibration_age_steps: int = 0
    """Steps since there were any, or since the start; 0 where the on-policy ratio is given."""
    lags: tuple[LagBucket, ...] = ()
    """The batch by the age of its oldest tokens; empty when a weight has no value."""
    warning_level: WarningLevel = WarningLevel.OK
    """How the run is doing, judged by its last steps."""
    warning_score: float = 0.0
    """The same as a number in [0, 1]; 1/3 warns, 2/3 is critical."""
    baseline_shift: float = 0.0
    """Mean over trajectories of the baseline minus the mean reward of those that share it."""
    masked_share: float = 0.0
    """Share of tokens that the method's gate gives no gradient, in [0, 1]."""
    gradient_norm: float = 0.0
    """L2 norm of the whole gradient before clipping; 0 when there is none, or no finite one."""
    learning_rate_scale: float = 0.0
    """Factor on the base learning rate in this step, in [0, 1]; 0 when the step was skipped."""
    learning_rate: float = 0.0
    """Base learning rate after warm-up times the scale."""
    skipped: SkipReason | None = None
    """Why no step was taken, or None."""
    skip_detail: str | None = None
    """The number at fault, for people, when there is one."""
