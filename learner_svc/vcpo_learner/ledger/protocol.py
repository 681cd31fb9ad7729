"""The ledger: every training trajectory from its lease to its end, each exactly once.

```
            grant                 all of a group arrived            a step takes it
   prompt --------->  in flight  ------------------------> buffered ----------------> consumed
     ^                    |                                    |
     |                    | expired, failed, handed back       | its turn is beyond the lag bound
     +--------------------+------------- dropped <-------------+
        granted again, until `max_attempts`
```

Invariants (DESIGN: accounting, lag, once), checked by `counts().check()` at every step:

* leased = in flight + buffered + consumed + dropped, each drop with a reason. A prompt that is
  granted again is leased again.
* A batch holds no token older than the lag bound at the version it will be applied to. Admission
  makes that rare to enforce (`vcpo.control.admission`); the check at consumption makes it true.
  The same holds for the throttle's limit, from the moment that it is tightened.
* A lease closes once, so a trajectory is accepted at most once.

What was sampled of a grant that is handed back stays with its prompt (`requeue`): the
next grant goes on with it. A failure ends it, since it may be what the failure comes from.

The unit is the prompt group: it is trained on whole or dropped whole, because a baseline over a
part of a group depends on which part was lost. Of complete groups that with the oldest token is
consumed first, among equals in the order of their grants (`vcpo.control.admission`).

Which prompt is granted next is a `PromptSource`'s to say, once no prompt is owed.

A run that samples dynamically (DAPO) drops groups of equal rewards as they arrive, and owes their
prompts no other grant. Admission counts them out, so their places go to the next prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.accounting import TrajectoryCounts
from vcpo_learner.ledger.groups import Group
from vcpo_learner.ledger.leases import OpenLease, SubmitOutcome


class Ledger(Protocol):
    """The seam behind which trajectories are kept; `TrajectoryLedger` is one process's."""

    def counts(self) -> TrajectoryCounts:
        """Where every trajectory is now."""

    def wasted_tokens(self) -> Mapping[str, int]:
        """Sampled tokens it was given and has dropped since its start, by `DropReason`."""

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Trajectories promised and not yet arrived, by worker."""

    def grant(
        self,
        worker_id: str,
        *,
        num_groups: int,
        policy_version: int,
        oldest_partial_version: int = 0,
    ) -> list[OpenLease]:
        """Lease `num_groups` prompts: requeued ones first, then those that the source chooses.

        Fewer when it has none to choose, as when its whole pool is in flight, and when the answers
        begun would be more than `MAX_PARTIAL_TOKENS`. Those with a token older than
        `oldest_partial_version` are forgotten.
        """

    def has_issued(self, lease_id: str) -> bool:
        """Whether the id has the form of this ledger's leases, open or closed."""

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept trajectories; repeating a submission changes nothing.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
        """

    def fail(self, lease_id: str) -> None:
        """End a lease whose generation failed; nothing happens when it is not open."""

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        begun: Sequence[PartialResponse] = (),
    ) -> int:
        """End open leases of one worker, all when none is named; returns how many it ended.

        begun: what was sampled, when one lease is named; none leaves what the lease began with.

        Raises:
            InvalidMessageError: when that is more answers than the lease wants.
        """

    def held_by(self, worker_id: str) -> list[str]:
        """Open leases of a worker, oldest first."""

    def expire(self) -> list[str]:
        """End the leases past their time; returns the worker of each."""

    def take_batch(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> list[Group] | None:
        """Consume one step's groups, oldest tokens first, or None while there are too few."""

    def return_batch(self, batch: Sequence[Group]) -> None:
        """Take back a batch on which no step was taken, as if it had not been consumed."""

    def quarantine(self, lease_ids: Collection[str]) -> list[Group]:
        """Drop buffered groups on which no step can be taken, and return them.

        Their prompts are not granted again: what ended an update may come from the prompt.
        """

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Arrived trajectories with tokens of a version: as few as have so many of them."""

    def drop_late(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> None:
        """Drop the groups whose turn comes too late, when the next is at `policy_version`.

        admission_lag_steps: the limit in force, where it is below the run's own `max_lag_steps`.
        """

    def preempt(self, num_trajectories: int) -> None:
        """Recall open leases with the newest tokens, until so many trajectories are recalled."""

    def preempted_leases(self, worker_id: str) -> list[str]:
        """Open leases that a worker is to cut and hand back, oldest first."""

    def snapshot(self) -> ledger_pb2.LedgerSnapshot:
        """What a checkpoint keeps."""

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on from a snapshot; only before the first grant."""
