"""What a ledger must do, written down a second time: plain sets and lists, and every fate kept."""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.fixtures.learner.dispatcher import TIMEOUT_S

Response = tuple[str, int]
"""A lease and the number of one of its responses."""
SIZE = 2  # trajectories per prompt
PROMPTS = 2  # per step
MAX_ATTEMPTS = 3


@dataclass
class Promise:
    """An open lease."""

    number: int
    group: int
    """Number of the group among all that were begun."""
    worker_id: str
    prompt_index: int
    failures: int
    expires_s: float
    partial: int | None = None
    """Oldest step of the response that the grant resumes."""
    kept: dict[Response, int] = field(default_factory=dict)
    """Oldest step of each response that arrived before a crash."""
    begun: int = 0
    """Number of the response that the grant resumes."""
    preempted: bool = False
    steps: dict[int, int] = field(default_factory=dict)
    """Oldest step of each response that has arrived."""

    @property
    def numbers(self) -> list[int]:
        return sorted(set(range(SIZE)) - {number for _, number in self.kept})

    @property
    def size(self) -> int:
        return len(self.numbers)


@dataclass
class Waiting:
    """A prompt that is leased before new ones."""

    prompt_index: int
    failures: int = 0
    partial: int | None = None
    """Oldest step of its partial response."""
    begun: int = 0
    """Number of that response."""
    kept: dict[Response, int] = field(default_factory=dict)
    number: int | None = None
    """Of the grant that a crash ended."""
    group: int | None = None
    """Number of its group; None if that was dropped."""


@dataclass
class Whole:
    """A complete group."""

    prompt_index: int
    group: int
    oldest: int
    members: tuple[Response, ...]
    workers: set[str | None]
    """Those that brought a part of it."""


@dataclass
class LedgerModel:
    """One surviving history; a crash goes back to a copy of it."""

    fates: dict[Response, str] = field(default_factory=dict)
    """The fate of every response ever leased."""
    brought_by: dict[Response, str | None] = field(default_factory=dict)
    """The worker of every response that arrived; None if it resumed what another one had begun."""
    open: dict[str, Promise] = field(default_factory=dict)
    fulfilled: list[str] = field(default_factory=list)
    buffered: dict[int, Whole] = field(default_factory=dict)
    """Complete groups, by grant."""
    requeued: deque[Waiting] = field(default_factory=deque)
    accuracies: dict[int, float] = field(default_factory=dict)
    """Of evaluations, by step."""
    lag_limit: object = None
    """What the lag limit was left at."""
    next_prompt: int = 0
    next_grant: int = 0
    next_group: int = 0
    step: int = 0
    consumed: dict[int, Whole] = field(default_factory=dict)
    """Groups by grant, in the order in which steps took them."""

    def grant(
        self, lease_id: str, worker_id: str, now_s: float, *, oldest_partial: int = 0
    ) -> Promise:
        """Lease a requeued prompt if there is one, else the next in order."""
        waiting = self.requeued.popleft() if self.requeued else Waiting(self.next_prompt)
        self.next_prompt = max(self.next_prompt, waiting.prompt_index + 1)
        partial = waiting.partial
        number = self.next_grant if waiting.number is None else waiting.number
        group = self.next_group if waiting.group is None else waiting.group
        self.next_group = max(self.next_group, group + 1)
        promise = Promise(
            number,
            group,
            worker_id,
            waiting.prompt_index,
            waiting.failures,
            now_s + TIMEOUT_S,
            partial if partial is not None and partial >= oldest_partial else None,
            {one: oldest for one, oldest in waiting.kept.items() if oldest >= oldest_partial},
            waiting.begun,
        )
        self.fates |= dict.fromkeys(waiting.kept.keys() - promise.kept.keys(), "lag_exceeded")
        self.open[lease_id] = promise
        self.fates |= {(lease_id, one): "in_flight" for one in promise.numbers}
        self.next_grant = max(self.next_grant, number + 1)
        return promise

    def submit(self, lease_id: str, numbers: Collection[int], oldest: int) -> list[str]:
        """Submit responses; return the outcomes, or none if one was not asked for."""
        if lease_id not in self.open:
            return ["duplicate" if lease_id in self.fulfilled else "lease_ended"] * len(numbers)
        promise = self.open[lease_id]
        if not set(numbers).issubset(promise.numbers):
            return []
        outcomes = []
        for number in numbers:
            outcomes.append("duplicate" if number in promise.steps else "accepted")
            promise.steps.setdefault(number, oldest)
            self.fates[lease_id, number] = "buffered"
            is_resumed = promise.partial is not None and number == promise.begun
            self.brought_by[lease_id, number] = None if is_resumed else promise.worker_id
        if len(promise.steps) == promise.size:
            del self.open[lease_id]
            self.fulfilled.append(lease_id)
            arrived = tuple((lease_id, number) for number in promise.steps)
            self.buffered[promise.number] = Whole(
                promise.prompt_index,
                promise.group,
                min([*promise.steps.values(), *promise.kept.values()]),
                (*promise.kept, *arrived),
                {promise.worker_id, *map(self.brought_by.get, (*promise.kept, *arrived))},
            )
        return outcomes

    def end(self, lease_id: str, reason: str, partial: int | None = None) -> None:
        """End an open lease, with the oldest step of a released response, or none."""
        promise = self.open.pop(lease_id)
        failed = reason == "generation_failed"
        failures = promise.failures + failed
        self.fates |= {(lease_id, one): reason for one in promise.numbers}
        if failures < MAX_ATTEMPTS:
            kept = promise.partial if partial is None else partial
            begun = promise.begun if partial is None else promise.numbers[0]
            partial = None if failed else kept
            again = Waiting(promise.prompt_index, failures, partial, begun, promise.kept)
            again.group = promise.group
            if promise.kept:
                self.requeued.appendleft(again)
            else:
                self.requeued.append(again)
        else:
            self.fates |= dict.fromkeys(promise.kept, reason)

    def set_aside(self, worker_id: str, failures_of: Mapping[int, int]) -> None:
        """End a worker's leases and drop its groups, in the order of their consumption."""
        for lease_id in self.held_by(worker_id, ()):
            self.end(lease_id, "worker_set_aside")
        for number in sorted(self.buffered, key=lambda one: (self.buffered[one].oldest, one)):
            if worker_id in (group := self.buffered[number]).workers:
                del self.buffered[number]
                self.fates |= dict.fromkeys(group.members, "worker_set_aside")
                self.requeued.append(Waiting(group.prompt_index, failures_of[number]))

    def preempted(self) -> set[str]:
        return {lease_id for lease_id, promise in self.open.items() if promise.preempted}

    def reason_to_hand_back(self, lease_id: str) -> str:
        return "surplus" if self.open[lease_id].preempted else "released"

    def held_by(self, worker_id: str, lease_ids: Sequence[str]) -> list[str]:
        """Open leases of a worker, all or those named."""
        return [
            lease_id
            for lease_id, promise in self.open.items()
            if promise.worker_id == worker_id and (not lease_ids or lease_id in lease_ids)
        ]

    def take(
        self, failures_of: Mapping[int, int], max_policy_lag_steps: int, limit: int | None = None
    ) -> list[int] | None:
        """Take a step's groups, in the order of their numbers: their grants, or None."""
        self.drop_late(failures_of, max_policy_lag_steps, limit)
        if len(self.buffered) < PROMPTS:
            return None
        taken = sorted(self.buffered, key=lambda one: (self.buffered[one].oldest, one))[:PROMPTS]
        taken.sort(key=lambda one: self.buffered[one].group)
        for number in taken:
            self.consumed[number] = group = self.buffered.pop(number)
            self.fates |= dict.fromkeys(group.members, "consumed")
        self.step += 1
        return taken

    def drop_late(
        self, failures_of: Mapping[int, int], max_policy_lag_steps: int, limit: int | None = None
    ) -> None:
        """Drop what will be too old for the run, then what will be for the throttle."""
        self._drop_beyond(failures_of, max_policy_lag_steps, "lag_exceeded")
        if limit is not None:
            self._drop_beyond(failures_of, limit, "throttled")

    def _drop_beyond(self, failures_of: Mapping[int, int], bound: int, reason: str) -> None:
        """Play the steps to come with what there is now."""
        left = sorted((group.oldest, number) for number, group in self.buffered.items())
        step, late = self.step, []
        while left:
            late += [number for oldest, number in left if oldest < step - bound]
            left = [one for one in left if one[0] >= step - bound][PROMPTS:]
            step += 1
        for number in sorted(late):
            group = self.buffered.pop(number)
            self.fates |= dict.fromkeys(group.members, reason)
            self.requeued.append(Waiting(group.prompt_index, failures_of[number]))

    def restart(self, step: int) -> None:
        """Begin again at the step of a checkpoint: leases end, what arrived stays.

        The groups of later steps wait again.
        """
        for number in list(self.consumed)[step * PROMPTS :]:
            self.buffered[number] = group = self.consumed.pop(number)
            self.fates |= dict.fromkeys(group.members, "buffered")
        self.step = step
        self.accuracies = {at: one for at, one in self.accuracies.items() if at <= step}
        ended = []
        for lease_id, promise in self.open.items():
            arrived = {(lease_id, one): oldest for one, oldest in promise.steps.items()}
            partial = None if promise.begun in promise.steps else promise.partial
            kept = promise.kept | arrived
            begun, number = promise.begun, promise.number
            ended.append(
                Waiting(promise.prompt_index, 0, partial, begun, kept, number, promise.group)
            )
            missing = ((lease_id, one) for one in promise.numbers)
            self.fates |= {one: "learner_restarted" for one in missing if one not in arrived}
        rest = [replace(waiting, failures=0) for waiting in self.requeued]
        self.requeued = deque([*ended, *rest])
        self.open = {}

    def tally(self) -> Counter[str]:
        return Counter(self.fates.values())
