"""The queue of runs to reconcile: each run at most once at a time, and later after a failure.

A key waits for its time or is in work. Adding a key that waits moves its time forward. Adding a key
in work makes it due when the work is done. So no change during a reconcile is missed, and no run is
reconciled twice at once. A key in back-off waits for the end of the back-off, whatever is added:
events of a failing run must not cause a storm of attempts. Not all workers reconcile runs of one
namespace: an admission webhook there that does not answer must not starve the others.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vcpo_operator.names import RunKey

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 300.0


@dataclass(slots=True, kw_only=True)
class _Entry:
    due_s: float | None = None
    """Time of the next reconcile; None while nobody has asked for it."""
    in_work: bool = False
    failures: int = 0
    """Failures in a row."""
    not_before_s: float = 0.0
    """End of the back-off."""


@dataclass(slots=True)
class RunQueue:
    """Runs to reconcile. All methods belong to one event loop."""

    clock: Callable[[], float]
    """Monotonic seconds; `get` waits in the time of the event loop."""
    most_of_namespace: int = sys.maxsize
    """Runs of one namespace that are in work at a time, at most."""
    jitter: Callable[[], float] = random.random
    """A number in [0, 1), which spreads runs that failed together."""
    _entries: dict[RunKey, _Entry] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: RunKey, after_s: float = 0.0) -> None:
        """Make a run due in `after_s` seconds at the latest."""
        entry = self._entries.setdefault(key, _Entry())
        due_s = max(self.clock() + after_s, entry.not_before_s)
        entry.due_s = due_s if entry.due_s is None else min(entry.due_s, due_s)
        self._changed.set()

    async def get(self) -> RunKey:
        """Wait for the next run that is due, and take it into work."""
        while True:
            self._changed.clear()
            due_s, key = min(self._startable(), default=(None, None))
            if due_s is not None and key is not None and due_s <= self.clock():
                entry = self._entries[key]
                entry.due_s, entry.in_work = None, True
                return key
            try:
                async with asyncio.timeout(None if due_s is None else due_s - self.clock()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def finish(
        self, key: RunKey, *, failed: bool = False, retry_after_s: float | None = None
    ) -> None:
        """End the work on a run; after a failure the next reconcile waits a back-off."""
        entry = self._entries[key]
        entry.in_work = False
        if not failed:
            entry.failures, entry.not_before_s = 0, 0.0
        else:
            entry.failures += 1
            doublings = min(entry.failures - 1, 16)  # bounded: a float may overflow
            backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**doublings)
            wait_s = max(backoff_s * (0.5 + self.jitter() / 2), retry_after_s or 0.0)
            entry.not_before_s = entry.due_s = self.clock() + wait_s
        if entry.due_s is None:
            del self._entries[key]
        self._changed.set()

    def reset_backoff(self, key: RunKey) -> None:
        """End a run's back-off: the cause of its failure may be gone."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.failures, entry.not_before_s = 0, 0.0

    def depth(self) -> int:
        """Return the number of runs that are due and not in work."""
        now_s = self.clock()
        return sum(due_s <= now_s for due_s, _ in self._waiting())

    def oldest_s(self) -> float:
        """Return how long the run that is due longest has been due; 0 when none is.

        Runs that wait for others of their namespace do not count.
        """
        now_s = self.clock()
        return max(0.0, now_s - min((due_s for due_s, _ in self._startable()), default=now_s))

    def _startable(self) -> list[tuple[float, RunKey]]:
        """Return the waiting runs whose namespace has not as many in work as it may have."""
        busy = Counter(key.namespace for key, entry in self._entries.items() if entry.in_work)
        return [
            each for each in self._waiting() if busy[each[1].namespace] < self.most_of_namespace
        ]

    def _waiting(self) -> list[tuple[float, RunKey]]:
        """Return the runs that are not in work, each with the time at which it is due."""
        entries = self._entries.items()
        return [
            (entry.due_s, key)
            for key, entry in entries
            if entry.due_s is not None and not entry.in_work
        ]
