"""What a ledger must do, written down a second time: plain sets and lists, and every fate kept."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tests.fixtures.learner.dispatcher import TIMEOUT_S

SIZE = 2  # trajectories per prompt
PROMPTS = 2  # per step
MAX_ATTEMPTS = 2


@dataclass
class Promise:
    """An open lease."""

    number: int
    worker_id: str
    prompt_index: int
    failures: int
    expires_s: float
    partial: int | None = None
    """Oldest version of the response that the grant resumes."""
    preempted: bool = False
    versions: dict[int, int] = field(default_factory=dict)
    """Oldest version of each response that has arrived."""


@dataclass
class LedgerModel:
    """One surviving history; a crash goes back to a copy of it."""

    fates: dict[tuple[int, int], str] = field(default_factory=dict)
    """The fate of response n of grant g, for every response ever leased."""
    open: dict[str, Promise] = field(default_factory=dict)
    fulfilled: set[str] = field(default_factory=set)
    buffered: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Prompt and oldest version of each complete group, by grant."""
    requeued: deque[tuple[int, int, int | None]] = field(default_factory=deque)
    """Prompt, failures, oldest version of the partial response."""
    next_prompt: int = 0
    next_grant: int = 0
    version: int = 0
    consumed: list[int] = field(default_factory=list)

    def grant(
        self,
        lease_id: str,
        worker_id: str,
        now_s: float,
        *,
        oldest_partial: int = 0,
        chosen: int | None = None,
    ) -> Promise:
        """Lease a requeued prompt if there is one, else the chosen one, else the next in order."""
        fresh = self.next_prompt if chosen is None else chosen
        prompt_index, failures, partial = (
            self.requeued.popleft() if self.requeued else (fresh, 0, None)
        )
        self.next_prompt = max(self.next_prompt, prompt_index + 1)
        kept = partial if partial is not None and partial >= oldest_partial else None
        promise = Promise(
            self.next_grant, worker_id, prompt_index, failures, now_s + TIMEOUT_S, kept
        )
        self.open[lease_id] = promise
        self.fates |= {(promise.number, one): "in_flight" for one in range(SIZE)}
        self.next_grant += 1
        return promise

    def submit(self, lease_id: str, numbers: Collection[int], oldest: int) -> list[str]:
        """Submit responses; return the outcomes."""
        if lease_id not in self.open:
            return ["duplicate" if lease_id in self.fulfilled else "lease_ended"] * len(numbers)
        promise = self.open[lease_id]
        outcomes = []
        for number in numbers:
            outcomes.append("duplicate" if number in promise.versions else "accepted")
            promise.versions.setdefault(number, oldest)
            self.fates[promise.number, number] = "buffered"
        if len(promise.versions) == SIZE:
            del self.open[lease_id]
            self.fulfilled.add(lease_id)
            oldest_of_all = min(promise.versions.values())
            self.buffered[promise.number] = (promise.prompt_index, oldest_of_all)
        return outcomes

    def end(self, lease_id: str, reason: str, partial: int | None = None) -> None:
        """End an open lease, with the oldest version of a released response, or none."""
        promise = self.open.pop(lease_id)
        failed = reason == "generation_failed"
        failures = promise.failures + failed
        self._drop(promise.number, reason)
        if failures < MAX_ATTEMPTS:
            kept = promise.partial if partial is None else partial
            self.requeued.append((promise.prompt_index, failures, None if failed else kept))

    def preempted(self) -> set[str]:
        """Open leases that their workers must release."""
        return {lease_id for lease_id, promise in self.open.items() if promise.preempted}

    def reason_to_hand_back(self, lease_id: str) -> str:
        """Why responses are dropped when the lease is released."""
        return "surplus" if self.open[lease_id].preempted else "released"

    def held_by(self, worker_id: str, lease_ids: Sequence[str]) -> list[str]:
        """Open leases of a worker, all or those named."""
        return [
            lease_id
            for lease_id, promise in self.open.items()
            if promise.worker_id == worker_id and (not lease_ids or lease_id in lease_ids)
        ]

    def take(
        self, failures_of: Mapping[int, int], max_lag_steps: int, limit: int | None = None
    ) -> list[int] | None:
        """Take a step's groups: their grants, or None."""
        self.drop_late(failures_of, max_lag_steps, limit)
        if len(self.buffered) < PROMPTS:
            return None
        taken = sorted(self.buffered, key=lambda one: (self.buffered[one][1], one))[:PROMPTS]
        for number in taken:
            del self.buffered[number]
            self.fates |= {(number, one): "consumed" for one in range(SIZE)}
        self.consumed += taken
        self.version += 1
        return taken

    def drop_late(
        self, failures_of: Mapping[int, int], max_lag_steps: int, limit: int | None = None
    ) -> None:
        """Drop what will be too old for the run, then what will be for the throttle."""
        self._drop_beyond(failures_of, max_lag_steps, "lag_exceeded")
        if limit is not None:
            self._drop_beyond(failures_of, limit, "throttled")

    def _drop_beyond(self, failures_of: Mapping[int, int], bound: int, reason: str) -> None:
        """Play the steps to come with what there is now."""
        left = sorted((oldest, number) for number, (_, oldest) in self.buffered.items())
        version, late = self.version, []
        while left:
            late += [number for oldest, number in left if oldest < version - bound]
            left = [one for one in left if one[0] >= version - bound][PROMPTS:]
            version += 1
        for number in sorted(late):
            prompt_index, _ = self.buffered.pop(number)
            self._drop(number, reason)
            self.requeued.append((prompt_index, failures_of[number], None))

    def restart(self) -> None:
        """Restore from a snapshot: open prompts are requeued, and failures reset."""
        opened = [(promise.prompt_index, 0, promise.partial) for promise in self.open.values()]
        for promise in self.open.values():
            self._drop(promise.number, "learner_restarted")
        self.requeued = deque(
            [*opened, *((index, 0, partial) for index, _, partial in self.requeued)]
        )
        self.open, self.fulfilled = {}, set()

    def tally(self) -> Counter[str]:
        """How many responses have each fate."""
        return Counter(self.fates.values())

    def _drop(self, number: int, reason: str) -> None:
        self.fates |= {(number, one): reason for one in range(SIZE)}
