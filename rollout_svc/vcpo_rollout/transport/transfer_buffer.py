"""Buffers for weights in transit: full sets and deltas, complete or still arriving.

A peer can read a transfer while it arrives, so a worker relays weights without delay. No receiver
trusts the bytes: each checks the finished weights against the learner's manifest.

```
arriving ---> complete       every byte is there
    +-------> discarded      broken off or corrupt; its readers get an error
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from vcpo.wire.errors import NotFoundError, UnavailableError
from vcpo.wire.weights import CorruptWeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identifies a full set or a delta."""

    incarnation: str
    policy_version: int
    base_policy_version: int | None
    """The version that a delta starts from; None for a full set."""


class Transfer:
    """The bytes of one full set or delta, in order. Owner: the worker's event loop."""

    def __init__(self, key: TransferKey, total_bytes: int) -> None:
        self.key = key
        self.total_bytes = total_bytes
        self._arrived: bytes | bytearray = bytearray()
        self._discarded = False
        self._changed = asyncio.Event()

    @property
    def num_arrived(self) -> int:
        """Number of bytes that have arrived."""
        return len(self._arrived)

    @property
    def is_complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.num_arrived == self.total_bytes

    def content(self) -> bytes:
        """Return the bytes that have arrived; no bytes can be added afterwards."""
        self._arrived = bytes(self._arrived)
        return self._arrived

    def extend(self, offset: int, data: bytes) -> None:
        """Append the bytes that follow those that have arrived.

        Raises:
            CorruptWeightsError: when they do not follow, or exceed the total.
        """
        end = offset + len(data)
        if offset != self.num_arrived or end > self.total_bytes:
            raise CorruptWeightsError(
                f"chunk: bytes {offset} to {end} do not follow {self.num_arrived} of"
                f" {self.total_bytes}"
            )
        assert isinstance(self._arrived, bytearray)  # a complete transfer takes no chunk
        self._arrived += data
        self._notify_readers()

    def fill(self, content: bytes) -> None:
        """Set all bytes at once."""
        assert len(content) == self.total_bytes
        self._arrived = content
        self._notify_readers()

    def discard(self) -> None:
        """Serve no further bytes; waiting readers get an error."""
        self._discarded = True
        self._notify_readers()

    async def read(self, offset: int, max_bytes: int) -> bytes:
        """Return up to `max_bytes` from an offset once there are any; none at the end.

        Raises:
            UnavailableError: when the transfer is discarded.
        """
        while not self._discarded and self.num_arrived <= offset < self.total_bytes:
            await self._changed.wait()
        if self._discarded:
            raise UnavailableError("policy: this worker discarded these weights; ask elsewhere")
        return bytes(self._arrived[offset : offset + max_bytes])

    def _notify_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TransferCache:
    """The transfers that this worker serves to peers. Owner: the worker's event loop.

    It holds the newest full set and the deltas that made it. A reader of an evicted transfer can
    still read it to its end.
    """

    def __init__(self) -> None:
        self._transfers: dict[TransferKey, Transfer] = {}
        self._newest: tuple[TransferKey, ...] = ()
        """The full set announced last, and its deltas."""
        self._changed = asyncio.Event()

    def announce(self, whole: Transfer, deltas: Iterable[Transfer]) -> None:
        """Add the transfers of the next version; keep the others until `commit`."""
        announced = {transfer.key: transfer for transfer in (whole, *deltas)}
        self._newest = tuple(announced)
        self._transfers |= announced
        self._changed.set()
        self._changed = asyncio.Event()

    def commit(self) -> None:
        """Evict all transfers but those announced last, which have arrived."""
        self._transfers = {key: self._transfers[key] for key in self._newest}

    def discard(self) -> None:
        """Remove and discard the transfers announced last."""
        for key in self._newest:
            self._transfers.pop(key).discard()
        self._newest = ()

    async def find(self, key: TransferKey, wait_s: float) -> Transfer:
        """Return a transfer; wait up to `wait_s` for a version that is not announced yet.

        Raises:
            NotFoundError: when this worker neither holds nor expects it.
        """
        try:
            async with asyncio.timeout(wait_s):
                while key not in self._transfers and not self._is_superseded(key):
                    await self._changed.wait()
        except TimeoutError:
            pass
        if key not in self._transfers:
            raise NotFoundError("policy: this worker does not hold these weights; ask the learner")
        return self._transfers[key]

    def _is_superseded(self, key: TransferKey) -> bool:
        """Whether this version or a later one is announced, so that the key will not be."""
        return any(
            newest.incarnation == key.incarnation and newest.policy_version >= key.policy_version
            for newest in self._newest
        )
