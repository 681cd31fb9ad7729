"""The accounting of a run's trajectories: where each one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """By `vcpo.records.reasons.DropReason`."""

    def check(self) -> None:
        """Check that every leased trajectory is counted exactly once.

        Raises:
            AccountingError: with all counts, if the sum differs.
        """
        total = self.in_flight + self.buffered + self.consumed + sum(self.dropped.values())
        if self.leased != total:
            raise AccountingError(f"leased must equal the sum of the rest ({total}): {self}")
