"""What an update returns: the numbers that are recorded, and those that its caller needs."""

from dataclasses import dataclass, field
from enum import StrEnum

from vcpo.algo import FreshTokens
from vcpo.records.step_record import UpdateRecord


class SkipReason(StrEnum):
    """Why a step was not taken."""

    NON_FINITE_WEIGHT = "non_finite_weight"
    """An importance weight or a gradient norm is not a number, or every weight is 0."""
    NON_FINITE_GRADIENT = "non_finite_gradient"
    """The gradient or its norm is not a number."""
    LOW_ESS = "low_ess"
    """The ESS ratio is below the share of the on-policy ratio that `refuseBelow` allows."""
    HIGH_DIVERGENCE = "high_divergence"
    """The KL divergence from behavior to target policy is above `refuseKlAbove`."""
    NO_GRADIENT = "no_gradient"
    """No trajectory has a gradient, for example when the rewards of every prompt are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult(UpdateRecord):
    """The record of an update, and numbers that are used at once and not recorded."""

    log_weights: tuple[float, ...] = ()
    """Log importance weights, nats, untruncated, the groups one after another; -inf is a weight of
    0. Empty when one has no value."""
    fresh: FreshTokens = field(default_factory=FreshTokens)
    """Tokens, of the batch and beside it, that were scored with the version that sampled them."""
    skip_detail: str | None = None
    """The number because of which the step was skipped, for people; None when there is none."""
