"""The account of a run's trajectories: where each one is, and why those lost were lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DropReason(StrEnum):
    """Why trajectories were not trained on."""

    LEASE_EXPIRED = "lease_expired"
    """The worker did not answer in time."""
    RELEASED = "handed_back"
    """The worker left or ran out of time, or somebody saw it die."""
    GENERATION_FAILED = "generation_failed"
    """The worker reported a typed failure."""
    LAG_EXCEEDED = "lag_exceeded"
    """A token was older than the lag bound when its turn came, or was sure to be."""
    THROTTLED = "throttled"
    """The same for the throttle's limit, where the run's own bound would have let it pass."""
    NO_SIGNAL = "no_signal"
    """All rewards of the group were equal, and the method trains on others only."""
    SURPLUS = "surplus"
    """Cut when a step's batch was complete; what was sampled goes on in the prompt's next grant."""
    QUARANTINED = "quarantined"
    """No step could be taken on its group."""
    LEARNER_RESTARTED = "learner_restarted"
    """In flight when the learner stopped."""


class AccountingError(AssertionError):
    """Trajectories appeared or vanished: a bug, and reason to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCounts:
    """Where every trajectory ever leased is now."""

    leased: int
    in_flight: int
    buffered: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Check that nothing is missing and nothing stands twice.

        Raises:
            AccountingError: with the counts, when the sum is off.
        """
        total = self.in_flight + self.buffered + self.consumed + sum(self.dropped.values())
        if self.leased != total:
            raise AccountingError(f"leased must equal the sum of the rest ({total}): {self}")
