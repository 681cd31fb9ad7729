"""The queue of runs to look at: each at most once at a time, and after a back-off when it failed.

A key is *waiting* for its time or *in work*. Asking for a key that waits brings its time forward;
asking for one in work makes it due as soon as the work is done, so that nothing that happens during
a look is missed and no run is looked at twice at once. A key backing off is brought forward by
nothing but its time: events of a failing run must not turn into a storm of attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vcpo_operator.names import RunKey

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 300.0


@dataclass(slots=True, kw_only=True)
class _Entry:
    due_s: float | None = None
    """When it is to be looked at; None while nothing is asked for."""
    in_work: bool = False
    failures: int = 0
    not_before_s: float = 0.0
    """End of the back-off."""


@dataclass(slots=True)
class RunQueue:
    """Runs to look at. All methods belong to one event loop."""

    clock: Callable[[], float]
    """Monotonic seconds; `get` waits in the event loop's time."""
    jitter: Callable[[], float] = random.random
    """A number in [0, 1), to spread what failed together."""
    _entries: dict[RunKey, _Entry] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: RunKey, after_s: float = 0.0) -> None:
        """Ask for a look at a run, so many seconds from now at the latest."""
        entry = self._entries.setdefault(key, _Entry())
        due_s = max(self.clock() + after_s, entry.not_before_s)
        entry.due_s = due_s if entry.due_s is None else min(entry.due_s, due_s)
        self._changed.set()

    async def get(self) -> RunKey:
        """Wait for the next run that is due, and take it into work."""
        while True:
            self._changed.clear()
            key, wait_s = self._next()
            if key is not None and wait_s <= 0.0:
                entry = self._entries[key]
                entry.due_s, entry.in_work = None, True
                return key
            await self._wait(None if key is None else wait_s)

    def done(
        self, key: RunKey, *, failed: bool = False, retry_after_s: float | None = None
    ) -> None:
        """Say that the look at a run is over; after a failure the next one waits."""
        entry = self._entries[key]
        entry.in_work = False
        if not failed:
            entry.failures, entry.not_before_s = 0, 0.0
        else:
            entry.failures += 1
            wait_s = max(self._backoff_s(entry.failures), retry_after_s or 0.0)
            entry.not_before_s = entry.due_s = self.clock() + wait_s
        if entry.due_s is None:
            del self._entries[key]
        self._changed.set()

    def reset_backoff(self, key: RunKey) -> None:
        """End a run's back-off: what it failed for may be mended."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.failures, entry.not_before_s = 0, 0.0

    def depth(self) -> int:
        """Number of runs that are due and not in work."""
        now_s = self.clock()
        return sum(1 for each in self._idle() if each <= now_s)

    def oldest_s(self) -> float:
        """How long the run that is due longest has been so; 0 when none is due."""
        return max(0.0, self.clock() - min(self._idle(), default=self.clock()))

    def _idle(self) -> list[float]:
        entries = self._entries.values()
        return [each.due_s for each in entries if each.due_s is not None and not each.in_work]

    def _next(self) -> tuple[RunKey | None, float]:
        waiting = [
            (entry.due_s, key)
            for key, entry in self._entries.items()
            if entry.due_s is not None and not entry.in_work
        ]
        if not waiting:
            return None, 0.0
        due_s, key = min(waiting)
        return key, due_s - self.clock()

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _backoff_s(self, failures: int) -> float:
        longest_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (failures - 1))
        return longest_s * (0.5 + self.jitter() / 2)
