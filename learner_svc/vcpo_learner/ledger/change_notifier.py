"""Waking everybody who waits for a change, on one event loop."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """A change that many coroutines wait for; each `notify` wakes all that wait at that moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s` seconds."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
