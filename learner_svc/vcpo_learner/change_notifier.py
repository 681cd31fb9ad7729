"""A notification that many coroutines of one event loop wait for."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """Wakes all coroutines that wait for a change; later waiters wait for the next one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
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
