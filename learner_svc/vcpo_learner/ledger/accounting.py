"""The accounting of a run's trajectories: where each one is, and why lost ones were dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DropReason(StrEnum):
    """Why trajectories were dropped and not trained on."""

    LEASE_EXPIRED = "lease_expired"
    """The worker did not submit before the lease expired."""
    RELEASED = "released"
    """The worker shut down or ran out of time, or its host reported it dead."""
    GENERATION_FAILED = "generation_failed"
    """The worker reported a typed failure."""
    LAG_EXCEEDED = "lag_exceeded"
    """A token was older than the lag bound when the group's turn came, or was certain to be."""
    THROTTLED = "throttled"
    """A token was older than the throttled lag limit, but not than the run's own lag bound."""
    NO_SIGNAL = "no_signal"
    """All rewards of the group were equal, and the method uses dynamic sampling."""
    SURPLUS = "surplus"
    """Preempted when the batch was complete; the prompt's next lease resumes the responses."""
    QUARANTINED = "quarantined"
    """An update failed because of its group."""
    LEARNER_RESTARTED = "learner_restarted"
    """In flight when the learner stopped."""


class AccountingError(AssertionError):
    """The counts of trajectories do not add up. This is a bug; the learner stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCounts:
    """Where every trajectory that was ever leased is now."""

    leased: int
    in_flight: int
    buffered: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By `DropReason`."""

    def check(self) -> None:
        """Check that every leased trajectory is counted exactly once.

        Raises:
            AccountingError: with all counts, if the sum differs.
        """
        total = self.in_flight + self.buffered + self.consumed + sum(self.dropped.values())
        if self.leased != total:
            raise AccountingError(f"leased must equal the sum of the rest ({total}): {self}")
