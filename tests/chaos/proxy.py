"""A TCP proxy between workers and learner, which passes bytes on, or does worse to them.

```
worker ---> proxy ---> learner      TO_LEARNER
       <---       <---              TO_WORKER
```
It knows nothing of what it carries. A disturbance counts the bytes, or connections, that it has
touched, so the harness knows that it happened.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

_CHUNK_BYTES = 16_384
_DIAL_S = 5.0


class Direction(StrEnum):
    """Which way bytes flow."""

    TO_LEARNER = "to_learner"
    TO_WORKER = "to_worker"


@dataclass(slots=True, kw_only=True, eq=False)
class Disturbance:
    """What is done to the bytes of one direction, or of both."""

    direction: Direction | None = None
    """None disturbs both."""
    delay_s: float = 0.0
    """Added to each chunk."""
    bytes_per_s: float = math.inf
    num_flipped: int = 0
    """Bytes that are still to be changed, one in each chunk."""
    num_swallowed: float = 0
    """Bytes that are still to be swallowed."""
    tears: bool = False
    """Whether the next chunk is cut in half, and its connection ended."""
    holds: bool = False
    """Whether bytes wait until the disturbance is over."""
    num_touched: int = 0
    """Bytes that it has delayed, changed, held or swallowed."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def concerns(self, direction: Direction) -> bool:
        return self.direction in (None, direction) and not self.over.is_set()

    async def pass_on(self, data: bytes) -> bytes:
        """Return what is left of a chunk, when its time has come."""
        if self.holds:
            self.num_touched += len(data)
            await self.over.wait()
        if self.delay_s or self.bytes_per_s < math.inf:
            self.num_touched += len(data)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.delay_s + len(data) / self.bytes_per_s):
                    await self.over.wait()
        if self.num_flipped and data:
            self.num_flipped -= 1
            self.num_touched += 1
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :]
        if self.num_swallowed > 0:
            self.num_swallowed -= len(data)
            self.num_touched += len(data)
            data = b""
        return data


@dataclass(slots=True, eq=False)
class _Link:
    """One connection of a worker, and the one to the learner that carries it."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class TcpProxy:
    """Listens on a port of its own for connections to another; an async context manager."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.refuses = False
        """Whether new connections are ended at once."""
        self.num_refused = 0
        self._target_port = target_port
        self._disturbances: list[Disturbance] = []
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def cut(self) -> int:
        """End every connection at once, without a goodbye; return how many there were."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    @contextlib.asynccontextmanager
    async def disturbed(self, disturbance: Disturbance) -> AsyncIterator[Disturbance]:
        """Disturb what passes until the end of the block."""
        self._disturbances.append(disturbance)
        try:
            yield disturbance
        finally:
            self._disturbances.remove(disturbance)
            disturbance.over.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            self.num_refused += 1
            writer.transport.abort()
            return
        try:
            async with asyncio.timeout(_DIAL_S):
                far_reader, far = await asyncio.open_connection("127.0.0.1", self._target_port)
        except (OSError, TimeoutError):  # the learner is not there
            writer.transport.abort()
            return
        link = _Link(writer, far)
        self._links.add(link)
        try:
            pumps = [
                asyncio.create_task(self._pump(reader, far, Direction.TO_LEARNER)),
                asyncio.create_task(self._pump(far_reader, writer, Direction.TO_WORKER)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._links.discard(link)
            link.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                for disturbance in list(self._disturbances):
                    if disturbance.concerns(direction):
                        data = await disturbance.pass_on(data)
                        if disturbance.tears and data:
                            await self._tear(disturbance, writer, data)
                            return
                writer.write(data)
                await writer.drain()

    async def _tear(
        self, disturbance: Disturbance, writer: asyncio.StreamWriter, data: bytes
    ) -> None:
        """Send half of a chunk; the connection ends after it."""
        disturbance.tears = False
        disturbance.num_touched += len(data)
        writer.write(data[: len(data) // 2])
        await writer.drain()
