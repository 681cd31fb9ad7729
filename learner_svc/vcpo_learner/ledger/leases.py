"""Open leases: who was promised which prompt, what has arrived, and when the promise lapses."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import PartialResponse, Trajectory, prompt_sum

_REMEMBERED_LEASES = 65_536
Clock = Callable[[], float]


class SubmitOutcome(StrEnum):
    """What became of one submitted trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LEASE_ENDED = "lease_ended"


@dataclass(slots=True, kw_only=True)
class OpenLease:
    """One grant of one prompt to one worker; owned by its `LeaseBook`."""

    lease_id: str
    worker_id: str
    grant_number: int
    """Counts grants of the run; among groups of equal age the order in which they are consumed."""
    prompt_index: int
    num_trajectories: int
    """Trajectories wanted."""
    attempt: int
    """1 and one more for every failed generation of the prompt."""
    granted_policy_version: int
    expires_s: float
    begun: tuple[PartialResponse, ...] = ()
    """Answers to go on with."""
    preempted: bool = False
    """Whether its worker is to cut it."""
    arrived: dict[str, Trajectory] = field(default_factory=dict)
    """Trajectories so far, by id."""

    @property
    def num_missing(self) -> int:
        """Trajectories still to come."""
        return self.num_trajectories - len(self.arrived)

    @property
    def num_arrived_tokens(self) -> int:
        """Tokens of the trajectories so far that the policy sampled."""
        return sum(trajectory.num_sampled_tokens for trajectory in self.arrived.values())

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that sampled a token, or may have."""
        begun = (one.oldest_policy_version for one in self.begun)
        return min(begun, default=self.granted_policy_version)

    def accept(self, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Take in trajectories; all of them or, when one does not belong here, none.

        Raises:
            InvalidMessageError: naming the first whose id is not one of this lease, or that answers
                another prompt than the rest, or than those begun. A group is compared with itself
                only: the text that was leased, and its tokens, are not known here.
        """
        prompt = next(iter([*self.arrived.values(), *trajectories])).prompt_token_ids
        begun = {one.prompt_xxh3 for one in self.begun} - {0}
        if begun - {prompt_sum(prompt)}:
            received = f"{len(prompt)} tokens that differ"
            bound = "those that the lease's answers were begun for"
            raise InvalidMessageError("trajectories[0].prompt_token_ids", received, bound)
        for index, trajectory in enumerate(trajectories):
            if trajectory.prompt_token_ids != prompt:
                name = f"trajectories[{index}].prompt_token_ids"
                received = f"{len(trajectory.prompt_token_ids)} tokens that differ"
                raise InvalidMessageError(name, received, "those of the lease's other answers")
            if not self._numbers(trajectory.trajectory_id):
                requirement = f"'{self.lease_id}/<0 to {self.num_trajectories - 1}>'"
                name = f"trajectories[{index}].trajectory_id"
                raise InvalidMessageError(name, trajectory.trajectory_id, requirement)
        outcomes = []
        for trajectory in trajectories:
            known = trajectory.trajectory_id in self.arrived
            outcomes.append(SubmitOutcome.DUPLICATE if known else SubmitOutcome.ACCEPTED)
            self.arrived.setdefault(trajectory.trajectory_id, trajectory)
        return outcomes

    def _numbers(self, trajectory_id: str) -> bool:
        prefix, _, number = trajectory_id.rpartition("/")
        if prefix != self.lease_id or not (number.isascii() and number.isdecimal()):
            return False
        return str(int(number)) == number and int(number) < self.num_trajectories


class LeaseBook:
    """The open leases of one kind of work. Owner: the learner's event loop.

    A lease is open until it is closed once, by whatever ended it; a closed lease never opens again,
    which is why nothing can be accepted twice. Ids carry the learner's incarnation, so an id from
    before a restart is unknown after it.
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
        """Grants made so far, those before a restart included."""
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
        begun: tuple[PartialResponse, ...] = (),
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
            begun=begun,
        )
        self._grants += 1
        self._open[lease.lease_id] = lease
        return lease

    def has_issued(self, lease_id: str) -> bool:
        """Whether the id has the form of this book's leases, open or closed."""
        return lease_id.startswith(f"{self._prefix}-")

    def submit(
        self, lease_id: str, trajectories: Sequence[Trajectory]
    ) -> tuple[list[SubmitOutcome], OpenLease | None]:
        """Take in trajectories; also returns the lease when they were its last, now closed.

        A closed lease answers for all of its trajectories alike: duplicates when it was fulfilled
        (known of the last `_REMEMBERED_LEASES`), else late.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
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
        """Close a lease that will not be fulfilled; None when it is not open."""
        return self._open.pop(lease_id, None)

    def expired_leases(self) -> list[OpenLease]:
        """Open leases past their time."""
        now_s = self._clock()
        return [lease for lease in self._open.values() if lease.expires_s <= now_s]

    def held_by(self, worker_id: str, lease_ids: Collection[str] = ()) -> list[OpenLease]:
        """Open leases of one worker, oldest first; with ids, only those among them."""
        return [
            lease
            for lease in self._open.values()
            if lease.worker_id == worker_id and (not lease_ids or lease.lease_id in lease_ids)
        ]

    def in_flight_by_worker(self) -> Counter[str]:
        """Trajectories promised and not yet arrived, by worker."""
        flights: Counter[str] = Counter()
        for lease in self._open.values():
            flights[lease.worker_id] += lease.num_missing
        return flights

    def all(self) -> list[OpenLease]:
        """Every open lease, oldest first."""
        return list(self._open.values())
