"""What an update returns: the numbers that are recorded, and those that its caller needs."""

from dataclasses import dataclass, field

from vcpo.algo import FreshTokens
from vcpo.records.step_record import UpdateRecord


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
