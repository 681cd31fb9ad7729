"""Open leases: which worker generates which prompt, what arrived, and when the lease expires."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, takewhile
from math import inf

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_from_message,
    partial_to_message,
    prompt_checksum,
    trajectory_from_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.clock import Clock

_REMEMBERED_LEASES = 65_536
_LOST_LEASES_PER_DRAW = 2
"""A worker that is killed once is no reason to sample others; responses that kill each worker, or
outlast each lease, must not be sampled for ever."""


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
    group_number: int
    """Number of the group among all groups of the run; with the draw it seeds the responses."""
    prompt_index: int
    response_numbers: tuple[int, ...]
    """Number in the group of each response that the worker is to submit."""
    attempt: int
    """1 plus the failed generations of the prompt."""
    granted_policy_version: int
    expires_s: float
    partial_responses: tuple[PartialResponse, ...] = ()
    """Responses that the worker resumes."""
    kept: tuple[Trajectory, ...] = ()
    """Members of the group that were accepted under an earlier lease, before the learner stopped;
    not among `response_numbers`."""
    lost_leases: int = 0
    """As in `RequeuedPrompt`."""
    preempted: bool = False
    """Whether the worker is to interrupt the generation and release the lease."""
    arrived: dict[str, Trajectory] = field(default_factory=dict)
    """Accepted trajectories, by id."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories that the worker is to submit."""
        return len(self.response_numbers)

    @property
    def num_missing(self) -> int:
        """Trajectories that have not arrived."""
        return self.num_trajectories - len(self.arrived)

    @property
    def draw(self) -> int:
        """Number of the group's draw, from 1. Two leases of one draw sample the same responses."""
        return 1 + self.lost_leases // _LOST_LEASES_PER_DRAW

    def lost_leases_after(self, *, failed: bool) -> int:
        """Return the lost leases of the group with this one.

        failed: whether its generation failed: then the next lease samples others at once.
        """
        return self.lost_leases + (_LOST_LEASES_PER_DRAW if failed else 1)

    @property
    def num_accepted(self) -> int:
        """Trajectories of the group that have been accepted, under this lease or before it."""
        return len(self.kept) + len(self.arrived)

    @property
    def num_arrived_tokens(self) -> int:
        """Tokens of the trajectories accepted under this lease that a policy sampled."""
        return sum(trajectory.num_sampled_tokens for trajectory in self.arrived.values())

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that can have sampled a token of the lease."""
        versions = (partial.oldest_policy_version for partial in self.partial_responses)
        return min(versions, default=self.granted_policy_version)

    @property
    def newest_resumed_version(self) -> int:
        """The newest version that sampled a token that the worker resumes; 0 if there is none."""
        versions = (partial.newest_policy_version for partial in self.partial_responses)
        return max(versions, default=0)

    def accept(self, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept all trajectories, or none if one of them does not belong to the lease.

        The learner does not know the text of a prompt or its tokens. It compares the prompt tokens
        of the lease's trajectories with each other and with the partial responses.

        Raises:
            InvalidMessageError: naming the first trajectory with an id of another lease, or with
                another prompt.
        """
        members = (*self.kept, *self.arrived.values(), *trajectories)
        prompt = members[0].prompt_token_ids
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
            lease_id, _, member = trajectory.trajectory_id.rpartition("/")
            if lease_id != self.lease_id or member not in map(str, self.response_numbers):
                numbers = ", ".join(map(str, self.response_numbers))
                requirement = f"'{self.lease_id}/' and one of {numbers}"
                name = f"trajectories[{index}].trajectory_id"
                raise InvalidMessageError(name, trajectory.trajectory_id, requirement)
        outcomes = []
        for trajectory in trajectories:
            known = trajectory.trajectory_id in self.arrived
            outcomes.append(SubmitOutcome.DUPLICATE if known else SubmitOutcome.ACCEPTED)
            self.arrived.setdefault(trajectory.trajectory_id, self._named(trajectory))
        return outcomes

    def _named(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the worker that sampled it, whatever it says itself."""
        is_resumed = any(each.number == trajectory.number for each in self.partial_responses)
        return replace(trajectory, worker_id=None if is_resumed else self.worker_id)

    def check_partial_responses(self, partial_responses: Sequence[PartialResponse]) -> None:
        """Check that each partial response has a number of the lease, and no two have the same.

        Raises:
            InvalidMessageError: naming the first that has not.
        """
        free = list(self.response_numbers)
        for index, partial in enumerate(partial_responses):
            if partial.number not in free:
                requirement = f"one of the lease's other responses {free}"
                raise InvalidMessageError(f"begun[{index}].number", partial.number, requirement)
            free.remove(partial.number)


class LeaseBook:
    """The open leases of one purpose. Owner: the learner's event loop.

    A lease is closed exactly once and never opens again, so nothing is accepted twice. Lease ids
    contain the learner's incarnation and count its leases, so no id is given twice.

    Every call of a worker asks for sums and for the worker's own leases, so both are kept up to
    date: a thousand workers hold some thousand leases.
    """

    def __init__(self, *, prefix: str, timeout_s: float, clock: Clock) -> None:
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._clock = clock
        self._open: dict[str, OpenLease] = {}
        """Oldest first. All have the same time, so they expire in this order."""
        self._held: defaultdict[str, dict[str, OpenLease]] = defaultdict(dict)
        """The open leases of each worker that has some."""
        self._leases_of_prompt: Counter[int] = Counter()
        self._missing_of: Counter[str] = Counter()
        """Trajectories that have not arrived, of each worker with open leases."""
        self._num_missing = 0
        self._num_accepted = 0
        self._fulfilled: OrderedDict[str, None] = OrderedDict()
        self._grants = 0
        self._groups = 0  # not the number of grants: a group that loses its lease has several
        self._ids = count()  # not the number of a grant: a later lease may take an earlier place

    @property
    def next_grant_number(self) -> int:
        """One more than the largest number of a grant so far, those before a restart included."""
        return self._grants

    @property
    def next_group_number(self) -> int:
        """Groups that were begun so far, those before a restart included."""
        return self._groups

    @property
    def num_missing(self) -> int:
        """Trajectories of the open leases that have not arrived."""
        return self._num_missing

    @property
    def num_accepted(self) -> int:
        """Trajectories of the groups of the open leases that have been accepted."""
        return self._num_accepted

    def __len__(self) -> int:
        """Count the open leases."""
        return len(self._open)

    def new_lease_id(self) -> str:
        """Return an id that no lease of any process has had."""
        return f"{self._prefix}-{next(self._ids)}"

    def open(
        self,
        *,
        worker_id: str,
        prompt_index: int,
        response_numbers: tuple[int, ...],
        attempt: int,
        policy_version: int,
        partial_responses: tuple[PartialResponse, ...] = (),
        kept: tuple[Trajectory, ...] = (),
        lost_leases: int = 0,
        grant_number: int | None = None,
        group_number: int | None = None,
        lease_id: str | None = None,
    ) -> OpenLease:
        """Grant a prompt to a worker.

        grant_number: place in the order; None for the next one.
        group_number: as in `OpenLease`; None for a new group.
        lease_id: None makes one.
        """
        number = self._grants if grant_number is None else grant_number
        if group_number is None:
            group_number, self._groups = self._groups, self._groups + 1
        lease = OpenLease(
            lease_id=self.new_lease_id() if lease_id is None else lease_id,
            worker_id=worker_id,
            grant_number=number,
            group_number=group_number,
            prompt_index=prompt_index,
            response_numbers=response_numbers,
            attempt=attempt,
            granted_policy_version=policy_version,
            expires_s=self._clock() + self._timeout_s,
            partial_responses=partial_responses,
            kept=kept,
            lost_leases=lost_leases,
        )
        self._grants = max(self._grants, number + 1)
        self._open[lease.lease_id] = self._held[worker_id][lease.lease_id] = lease
        self._leases_of_prompt[prompt_index] += 1
        self._count(lease, missing=lease.num_missing, accepted=lease.num_accepted)
        return lease

    def get(self, lease_id: str) -> OpenLease | None:
        """Return an open lease; None if it is not open."""
        return self._open.get(lease_id)

    def has_issued(self, lease_id: str) -> bool:
        """Return whether the id has the form of this book's leases, open or closed."""
        return lease_id.startswith(f"{self._prefix}-")

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease; None if it is not open."""
        lease = self._open.get(lease_id)
        return None if lease is None else lease.worker_id

    def granted_s(self, lease_id: str) -> float:
        """Return when an open lease was granted; infinitely early if it is not open."""
        lease = self._open.get(lease_id)
        return -inf if lease is None else lease.expires_s - self._timeout_s

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
        num_accepted = outcomes.count(SubmitOutcome.ACCEPTED)
        self._count(lease, missing=-num_accepted, accepted=num_accepted)
        if lease.num_missing:
            return outcomes, None
        self.close(lease_id)
        self._fulfilled[lease_id] = None
        if len(self._fulfilled) > _REMEMBERED_LEASES:
            self._fulfilled.popitem(last=False)
        return outcomes, lease

    def close(self, lease_id: str) -> OpenLease | None:
        """Close and return a lease; None if it is not open."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            held = self._held[lease.worker_id]
            del held[lease_id]
            self._count(lease, missing=-lease.num_missing, accepted=-lease.num_accepted)
            self._leases_of_prompt[lease.prompt_index] -= 1
            if not self._leases_of_prompt[lease.prompt_index]:
                del self._leases_of_prompt[lease.prompt_index]
            if not held:
                del self._held[lease.worker_id], self._missing_of[lease.worker_id]
        return lease

    def expired_leases(self) -> list[OpenLease]:
        """Return the open leases whose time is over."""
        now_s = self._clock()
        return list(takewhile(lambda lease: lease.expires_s <= now_s, self._open.values()))

    def held_by(self, worker_id: str, lease_ids: Collection[str] = ()) -> list[OpenLease]:
        """Return the open leases of one worker, oldest first; with ids, only those among them."""
        return [
            lease
            for lease in self._held.get(worker_id, {}).values()
            if not lease_ids or lease.lease_id in lease_ids
        ]

    def prompts(self) -> Collection[int]:
        """Return the prompts of the open leases."""
        return self._leases_of_prompt.keys()

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Return the number of trajectories that have not arrived, by worker."""
        return self._missing_of

    def all(self) -> list[OpenLease]:
        """Return every open lease, oldest first."""
        return list(self._open.values())

    def to_messages(self) -> list[ledger_pb2.OpenLease]:
        """Return the open leases for a checkpoint, oldest first, without their deadlines."""
        return [_lease_to_message(lease) for lease in self._open.values()]

    def restore(
        self,
        messages: Iterable[ledger_pb2.OpenLease],
        *,
        next_grant_number: int,
        next_group_number: int,
    ) -> None:
        """Open leases of another process again, and number the next grant and the next group.

        Raises:
            InvalidMessageError: naming the first invalid field.
        """
        for message in messages:
            kept = _trajectories(message.kept, "kept")
            lease = self.open(
                lease_id=message.lease_id,
                worker_id=message.worker_id,
                grant_number=message.grant_number,
                group_number=message.group_number,
                prompt_index=message.prompt_index,
                response_numbers=missing_numbers(kept, message.num_trajectories + len(kept)),
                attempt=message.attempt,
                policy_version=message.granted_policy_version,
                partial_responses=tuple(
                    partial_from_message(each, path=f"open_leases[].partial_responses[{index}]")
                    for index, each in enumerate(message.partial_responses)
                ),
                kept=kept,
                lost_leases=message.lost_leases,
            )
            arrived = _trajectories(message.arrived, "arrived")
            lease.arrived = {each.trajectory_id: each for each in arrived}
            self._count(lease, missing=-len(lease.arrived), accepted=len(lease.arrived))
        self._grants = next_grant_number
        self._groups = next_group_number

    def _count(self, lease: OpenLease, *, missing: int, accepted: int) -> None:
        """Add to the sums over the open leases."""
        self._missing_of[lease.worker_id] += missing
        self._num_missing += missing
        self._num_accepted += accepted


def missing_numbers(accepted: Collection[Trajectory], group_size: int) -> tuple[int, ...]:
    """Return numbers in a group for the responses that it misses, none of an accepted member."""
    found = {trajectory.number for trajectory in accepted}
    return tuple(number for number in range(group_size) if number not in found)


def _lease_to_message(lease: OpenLease) -> ledger_pb2.OpenLease:
    return ledger_pb2.OpenLease(
        lease_id=lease.lease_id,
        worker_id=lease.worker_id,
        grant_number=lease.grant_number,
        group_number=lease.group_number,
        prompt_index=lease.prompt_index,
        num_trajectories=lease.num_trajectories,
        attempt=lease.attempt,
        granted_policy_version=lease.granted_policy_version,
        partial_responses=[partial_to_message(each) for each in lease.partial_responses],
        kept=[trajectory_to_message(each) for each in lease.kept],
        arrived=[trajectory_to_message(each) for each in lease.arrived.values()],
        lost_leases=lease.lost_leases,
    )


def _trajectories(messages: Iterable[work_pb2.Trajectory], field: str) -> tuple[Trajectory, ...]:
    return tuple(
        trajectory_from_message(each, path=f"open_leases[].{field}[{index}]")
        for index, each in enumerate(messages)
    )
