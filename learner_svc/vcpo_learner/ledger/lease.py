"""The lease: the work on one prompt, from its first grant until it is trained on or given up.

```
waiting    no `lease_id`: requeued, to be leased again before any new prompt
open       `worker_id` is to submit `response_numbers` until `expires_s`
complete   all responses were accepted: a group that waits for its step, and then the batch's
```

Partial responses belong to the prompt: they are no trajectories, so the accounting does not count
them, and the next lease of the prompt resumes them. Accepted trajectories stay accepted over a
restart of the learner: the next lease asks for the other members of the group only.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, zip_longest
from math import inf
from typing import Final, Self

import xxhash

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
from vcpo.wire.versions import step_of

MAX_ATTEMPTS: Final = 3
"""Failed generations after which a prompt is given up."""

NEXT: Final = -1
"""Number that stands for the next free one, of a grant or a group."""
_LOST_LEASES_PER_DRAW = 2
"""A worker that is killed once is no reason to sample others; responses that kill each worker, or
outlast each lease, must not be sampled for ever."""


class Purpose(StrEnum):
    """What a lease's trajectories are used for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class SubmitOutcome(StrEnum):
    """What the learner did with one submitted trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LEASE_ENDED = "lease_ended"


@dataclass(slots=True, kw_only=True, order=True)
class Lease:
    """The work on one prompt. Two leases compare by their grants. Owner: the ledger or a round."""

    grant_number: int = NEXT
    """Place in the run's order; groups of equal age are consumed in it. A prompt that waits keeps
    its place over a restart of the learner; otherwise it is `NEXT`, and goes to the end."""
    group_number: int = field(default=NEXT, compare=False)
    """Number of the group in the run; with the draw it seeds the responses. It is kept if the next
    lease is to sample the same ones. `NEXT`: the next lease samples others."""
    prompt_index: int = field(compare=False)
    purpose: Purpose = field(default=Purpose.TRAIN, compare=False)
    failures: int = field(default=0, compare=False)
    lost_leases: int = field(default=0, compare=False)
    """Leases that ended without a result, perhaps because of the responses themselves. Every second
    one changes the draw. A failed generation counts 2, a restart of the learner 0."""
    partial_responses: tuple[PartialResponse, ...] = field(default=(), compare=False)
    """Responses to resume, at most one for each number."""
    accepted: dict[int, Trajectory] = field(default_factory=dict, compare=False)
    """Accepted members of the group, by their number in it. Those that an earlier lease brought are
    not among `response_numbers`."""
    lease_id: str = field(default="", compare=False)
    """Empty while the prompt waits."""
    worker_id: str = field(default="", compare=False)
    """Worker that holds or held the lease. It may have resumed what another one began."""
    response_numbers: tuple[int, ...] = field(default=(), compare=False)
    """Number in the group of each response that the worker is to submit."""
    policy_version: int = field(default=0, compare=False)
    """The learner's version at the grant."""
    held_version: int = field(default=0, compare=False)
    """Version that the worker held when it asked. It is not kept over a restart: no lease is."""
    expires_s: float = field(default=inf, compare=False)
    preempted: bool = field(default=False, compare=False)
    """Whether the worker is to interrupt the generation and release the lease."""

    @property
    def num_trajectories(self) -> int:
        return len(self.response_numbers)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(self.accepted[number] for number in sorted(self.accepted))

    @property
    def arrived(self) -> list[Trajectory]:
        return [self.accepted[each] for each in self.response_numbers if each in self.accepted]

    @property
    def num_missing(self) -> int:
        return sum(number not in self.accepted for number in self.response_numbers)

    @property
    def workers(self) -> set[str | None]:
        return {self.worker_id, *(each.worker_id for each in self.accepted.values())}

    @property
    def draw(self) -> int:
        return 1 + self.lost_leases // _LOST_LEASES_PER_DRAW

    @property
    def num_partial_tokens(self) -> int:
        return sum(len(partial.token_ids) for partial in self.partial_responses)

    @property
    def oldest_step(self) -> int:
        return min(each.oldest_step for each in self.accepted.values())

    @property
    def oldest_step_to_come(self) -> int:
        steps = (partial.oldest_step for partial in self.partial_responses)
        return min(steps, default=step_of(self.policy_version))

    @property
    def oldest_version(self) -> int:
        spans = chain.from_iterable(each.version_spans for each in self.partial_responses)
        return min([self.held_version, *(span.policy_version for span in spans)])

    def seed(self, run_seed: int) -> int:
        """Return the seed of the responses, 64 bits.

        The leases of a group share it as long as they have the same draw. An evaluation at another
        version is seeded anew.
        """
        parts = [run_seed, self.purpose, self.group_number, self.draw]
        if self.purpose is Purpose.EVALUATION:
            parts.append(self.policy_version)
        return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())

    def accept(self, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept all trajectories, or none if one of them does not belong to the lease.

        The learner does not know the text of a prompt or its tokens. It compares the prompt tokens
        of the lease's trajectories with each other and with the partial responses.
        """
        self._check_prompt(trajectories)
        outcomes = []
        for each in trajectories:
            known = each.number in self.accepted
            outcomes.append(SubmitOutcome.DUPLICATE if known else SubmitOutcome.ACCEPTED)
            if not known:  # with the worker that sampled it, whatever it says itself
                is_resumed = any(one.number == each.number for one in self.partial_responses)
                worker_id = None if is_resumed else self.worker_id
                self.accepted[each.number] = replace(each, worker_id=worker_id)
        return outcomes

    def check_partial_responses(self, partial_responses: Sequence[PartialResponse]) -> None:
        """Check that each partial response has a number of the lease, and no two have the same."""
        free = list(self.response_numbers)
        for index, partial in enumerate(partial_responses):
            if partial.number not in free:
                requirement = f"one of the lease's other responses {free}"
                raise InvalidMessageError(f"begun[{index}].number", partial.number, requirement)
            free.remove(partial.number)

    def requeue(
        self,
        *,
        partial_responses: tuple[PartialResponse, ...],
        failed: bool = False,
        is_lost: bool = False,
    ) -> Self:
        """Return the prompt as it waits for its next lease, without what arrived under this one.

        failed: whether the generation failed: then the next lease samples others at once.
        is_lost: whether the lease brought nothing, perhaps because of its responses.
        """
        num_lost = _LOST_LEASES_PER_DRAW if failed else 1
        kept = {n: each for n, each in self.accepted.items() if n not in self.response_numbers}
        return replace(
            self._waiting(),
            grant_number=NEXT,
            failures=self.failures + failed,
            lost_leases=self.lost_leases + (num_lost if is_lost else 0),
            partial_responses=partial_responses,
            accepted=kept,
        )

    def requeue_unfinished(self) -> Self:
        unfinished = (each for each in self.partial_responses if each.number not in self.accepted)
        return replace(self._waiting(), partial_responses=tuple(unfinished))

    def without_tokens_before(self, step: int) -> Self:
        return replace(
            self,
            partial_responses=tuple(
                one for one in self.partial_responses if one.oldest_step >= step
            ),
            accepted={n: one for n, one in self.accepted.items() if one.oldest_step >= step},
        )

    def _waiting(self) -> Self:
        return replace(
            self, lease_id="", worker_id="", response_numbers=(), expires_s=inf, preempted=False
        )

    def _check_prompt(self, trajectories: Sequence[Trajectory]) -> None:
        """Check that trajectories are to this prompt, and have ids of this lease.

        Raises: as `accept`.
        """
        prompt = next(iter((*self.accepted.values(), *trajectories))).prompt_token_ids
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


def missing_numbers(accepted: Collection[int], group_size: int) -> tuple[int, ...]:
    """Return the numbers in a group of the responses that it misses."""
    return tuple(number for number in range(group_size) if number not in accepted)


def newest_trajectories(
    groups: Sequence[Sequence[Trajectory]], *, policy_version: int, num_tokens: int
) -> list[Trajectory]:
    """Return trajectories until they hold `num_tokens` tokens of a version; all if too few.

    One trajectory of every group comes before a second of any group.
    """
    found: list[Trajectory] = []
    for trajectory in filter(None, chain.from_iterable(zip_longest(*groups))):
        if num_tokens <= 0:
            break
        if (own := trajectory.num_fresh_tokens(policy_version)) > 0:
            found.append(trajectory)
            num_tokens -= own
    return found


def lease_to_message(lease: Lease) -> ledger_pb2.HeldLease:
    """Write a lease of training for a checkpoint, without its deadline."""
    return ledger_pb2.HeldLease(
        grant_number=lease.grant_number,
        group_number=lease.group_number,
        prompt_index=lease.prompt_index,
        failures=lease.failures,
        lost_leases=lease.lost_leases,
        partial_responses=[partial_to_message(each) for each in lease.partial_responses],
        accepted=[trajectory_to_message(each) for each in lease.accepted.values()],
        lease_id=lease.lease_id,
        worker_id=lease.worker_id,
        response_numbers=lease.response_numbers,
        policy_version=lease.policy_version,
    )


def lease_from_message(message: ledger_pb2.HeldLease, *, path: str) -> Lease:
    """Read what `lease_to_message` returned; `path` is its field, for the error."""
    accepted = [
        trajectory_from_message(each, path=f"{path}.accepted[{index}]")
        for index, each in enumerate(message.accepted)
    ]
    try:
        by_number = {each.number: each for each in accepted}
    except ValueError as error:
        requirement = "ids that end with a number"
        raise InvalidMessageError(f"{path}.accepted", str(error), requirement) from error
    return Lease(
        grant_number=message.grant_number,
        group_number=message.group_number,
        prompt_index=message.prompt_index,
        failures=message.failures,
        lost_leases=message.lost_leases,
        partial_responses=partials_from_messages(
            message.partial_responses, path=f"{path}.partial_responses"
        ),
        accepted=by_number,
        lease_id=message.lease_id,
        worker_id=message.worker_id,
        response_numbers=tuple(message.response_numbers),
        policy_version=message.policy_version,
    )


def partials_from_messages(
    messages: Iterable[work_pb2.PartialResponse], *, path: str
) -> tuple[PartialResponse, ...]:
    """Read partial responses; `path` is the field of them, for the error."""
    return tuple(
        partial_from_message(each, path=f"{path}[{index}]") for index, each in enumerate(messages)
    )
