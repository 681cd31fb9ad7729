"""Open leases: which worker generates which prompt, what arrived, and when the lease expires."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import PartialResponse, Trajectory, prompt_checksum
from vcpo_learner.clock import Clock

_REMEMBERED_LEASES = 65_536


class SubmitOutcome(StrEnum):
    """What the learner did with one submitted trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LEASE_ENDED = "lease_ended"


@dataclass(slots=True, kw_only=True)
class OpenLease:
    """One grant of one prompt to one worker; owned by its `LeaseBook`."""

    lease_id: str
    worker_id: str
    grant_number: int
    """Position of the grant in the run; groups of equal age are consumed in this order."""
    prompt_index: int
    num_trajectories: int
    """Trajectories that the worker is to submit."""
    attempt: int
    """1 plus the failed generations of the prompt."""
    granted_policy_version: int
    expires_s: float
    partial_responses: tuple[PartialResponse, ...] = ()
    """Responses that the worker resumes."""
    preempted: bool = False
    """Whether the worker is to interrupt the generation and release the lease."""
    arrived: dict[str, Trajectory] = field(default_factory=dict)
    """Accepted trajectories, by id."""

    @property
    def num_missing(self) -> int:
        """Trajectories that have not arrived."""
        return self.num_trajectories - len(self.arrived)

    @property
    def num_arrived_tokens(self) -> int:
        """Tokens of the accepted trajectories that a policy sampled."""
        return sum(trajectory.num_sampled_tokens for trajectory in self.arrived.values())

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that can have sampled a token of the lease."""
        versions = (partial.oldest_policy_version for partial in self.partial_responses)
        return min(versions, default=self.granted_policy_version)

    def accept(self, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept all trajectories, or none if one of them does not belong to the lease.

        The learner does not know the text of a prompt or its tokens. It compares the prompt tokens
        of the lease's trajectories with each other and with the partial responses.

        Raises:
            InvalidMessageError: naming the first trajectory with an id of another lease, or with
                another prompt.
        """
        prompt = next(iter([*self.arrived.values(), *trajectories])).prompt_token_ids
        leased_sums = {partial.prompt_xxh3 for partial in self.partial_responses} - {0}
        if leased_sums - {prompt_checksum(prompt)}:
            received = f"{len(prompt)} tokens that differ"
            requirement = "the prompt of the lease's partial responses"
            raise InvalidMessageError("trajectories[0].prompt_token_ids", received, requirement)
        for index, trajectory in enumerate(trajectories):
            if trajectory.prompt_token_ids != prompt:
                name = f"trajectories[{index}].prompt_token_ids"
                received = f"{len(trajectory.prompt_token_ids)} tokens that differ"
                requirement = "the prompt of the lease's other trajectories"
                raise InvalidMessageError(name, received, requirement)
            if not self._has_member(trajectory.trajectory_id):
                requirement = f"'{self.lease_id}/<0 to {self.num_trajectories - 1}>'"
                name = f"trajectories[{index}].trajectory_id"
                raise InvalidMessageError(name, trajectory.trajectory_id, requirement)
        outcomes = []
        for trajectory in trajectories:
            known = trajectory.trajectory_id in self.arrived
            outcomes.append(SubmitOutcome.DUPLICATE if known else SubmitOutcome.ACCEPTED)
            self.arrived.setdefault(trajectory.trajectory_id, trajectory)
        return outcomes

    def _has_member(self, trajectory_id: str) -> bool:
        """Return whether the id is `<lease id>/<number>` with a number of this lease."""
        prefix, _, number = trajectory_id.rpartition("/")
        if prefix != self.lease_id or not (number.isascii() and number.isdecimal()):
            return False
        return str(int(number)) == number and int(number) < self.num_trajectories


class LeaseBook:
    """The open leases of one purpose. Owner: the learner's event loop.

    A lease is closed exactly once and never opens again, so nothing is accepted twice. Lease ids
    contain the learner's incarnation, so a restarted learner does not know the ids from before.
    """

    def __init__(self, *, prefix: str, timeout_s: float, clock: Clock) -> None:
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._clock = clock
        self._open: dict[str, OpenLease] = {}
        self._fulfilled: OrderedDict[str, None] = OrderedDict()
        self._grants = 0

    @property
    def next_grant_number(self) -> int:
        """Number of grants of the run so far, including those before a restart."""
        return self._grants

    def resume_numbering(self, grant_number: int) -> None:
        """Number the next grant `grant_number`, after a restart."""
        self._grants = grant_number

    def __len__(self) -> int:
        """Count the open leases."""
        return len(self._open)

    def open(
        self,
        *,
        worker_id: str,
        prompt_index: int,
        num_trajectories: int,
        attempt: int,
        policy_version: int,
        partial_responses: tuple[PartialResponse, ...] = (),
    ) -> OpenLease:
        """Grant a prompt to a worker."""
        lease = OpenLease(
            lease_id=f"{self._prefix}-{self._grants}",
            worker_id=worker_id,
            grant_number=self._grants,
            prompt_index=prompt_index,
            num_trajectories=num_trajectories,
            attempt=attempt,
            granted_policy_version=policy_version,
            expires_s=self._clock() + self._timeout_s,
            partial_responses=partial_responses,
        )
        self._grants += 1
        self._open[lease.lease_id] = lease
        return lease

    def has_issued(self, lease_id: str) -> bool:
        """Return whether the id has the form of this book's leases, open or closed."""
        return lease_id.startswith(f"{self._prefix}-")

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease; None if it is not open."""
        lease = self._open.get(lease_id)
        return None if lease is None else lease.worker_id

    def submit(
        self, lease_id: str, trajectories: Sequence[Trajectory]
    ) -> tuple[list[SubmitOutcome], OpenLease | None]:
        """Accept trajectories; also return the lease, closed, if it is fulfilled now.

        All trajectories of a closed lease get the same outcome: `DUPLICATE` if the lease was
        fulfilled (the book remembers the last `_REMEMBERED_LEASES`), else `LEASE_ENDED`.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        lease = self._open.get(lease_id)
        if lease is None:
            fulfilled = lease_id in self._fulfilled
            outcome = SubmitOutcome.DUPLICATE if fulfilled else SubmitOutcome.LEASE_ENDED
            return [outcome] * len(trajectories), None
        outcomes = lease.accept(trajectories)
        if lease.num_missing:
            return outcomes, None
        del self._open[lease_id]
        self._fulfilled[lease_id] = None
        if len(self._fulfilled) > _REMEMBERED_LEASES:
            self._fulfilled.popitem(last=False)
        return outcomes, lease

    def close(self, lease_id: str) -> OpenLease | None:
        """Close a lease that is not fulfilled; return None if it is not open."""
        return self._open.pop(lease_id, None)

    def expired_leases(self) -> list[OpenLease]:
        """Return the open leases whose time is over."""
        now_s = self._clock()
        return [lease for lease in self._open.values() if lease.expires_s <= now_s]

    def held_by(self, worker_id: str, lease_ids: Collection[str] = ()) -> list[OpenLease]:
        """Return the open leases of one worker, oldest first; with ids, only those among them."""
        return [
            lease
            for lease in self._open.values()
            if lease.worker_id == worker_id and (not lease_ids or lease.lease_id in lease_ids)
        ]

    def in_flight_by_worker(self) -> Counter[str]:
        """Count the trajectories that have not arrived, by worker."""
        counts: Counter[str] = Counter()
        for lease in self._open.values():
            counts[lease.worker_id] += lease.num_missing
        return counts

    def all(self) -> list[OpenLease]:
        """Return every open lease, oldest first."""
        return list(self._open.values())
