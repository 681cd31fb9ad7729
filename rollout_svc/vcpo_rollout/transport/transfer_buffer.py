"""What weights travel in: full sets and deltas, some complete, some still arriving.

A piece can be read while it arrives, so a worker passes weights on without waiting for their end.
Nobody may trust what arrives: who received pieces checks what they make against the learner's
manifest, and so does every worker that it passes them on to.

```
arriving ---> complete      every byte is there
    +--------> given up      broken off, or not what the learner published; readers are told
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
    """What a piece is."""

    incarnation: str
    policy_version: int
    base_policy_version: int | None
    """What a delta starts from; None for the full set."""


class Transfer:
    """Bytes of one full set or delta, from the first on. Owner: the worker's event loop."""

    def __init__(self, key: TransferKey, total_bytes: int) -> None:
        self.key = key
        self.total_bytes = total_bytes
        self._arrived: bytes | bytearray = bytearray()
        self._discarded = False
        self._changed = asyncio.Event()

    @property
    def num_arrived(self) -> int:
        """Bytes that are there."""
        return len(self._arrived)

    @property
    def is_complete(self) -> bool:
        """Whether every byte is there."""
        return self.num_arrived == self.total_bytes

    def content(self) -> bytes:
        """What has arrived; nothing can be added after."""
        self._arrived = bytes(self._arrived)
        return self._arrived

    def extend(self, offset: int, data: bytes) -> None:
        """Add the bytes that follow those that are there.

        Raises:
            CorruptWeightsError: when they do not follow, or are more than there can be.
        """
        end = offset + len(data)
        if offset != self.num_arrived or end > self.total_bytes:
            raise CorruptWeightsError(
                f"chunk: bytes {offset} to {end} do not follow {self.num_arrived} of"
                f" {self.total_bytes}"
            )
        assert isinstance(self._arrived, bytearray)  # a complete piece has room for no chunk
        self._arrived += data
        self._tell()

    def fill(self, content: bytes) -> None:
        """Take all bytes at once."""
        assert len(content) == self.total_bytes
        self._arrived = content
        self._tell()

    def discard(self) -> None:
        """Stop passing it on; whoever reads is told."""
        self._discarded = True
        self._tell()

    async def read(self, offset: int, max_bytes: int) -> bytes:
        """Return up to `max_bytes` from an offset, waiting for the first; none at the end.

        Raises:
            UnavailableError: when the piece is given up.
        """
        while not self._discarded and self.num_arrived <= offset < self.total_bytes:
            await self._changed.wait()
        if self._discarded:
            raise UnavailableError("policy: these weights are no longer passed on; ask elsewhere")
        return bytes(self._arrived[offset : offset + max_bytes])

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TransferCache:
    """The pieces that this worker has and passes on. Owner: the worker's event loop.

    It keeps the full set of the newest version and the deltas that it was made by. A piece taken
    off the shelf stays whole for those who read it already.
    """

    def __init__(self) -> None:
        self._transfers: dict[TransferKey, Transfer] = {}
        self._coming: tuple[TransferKey, ...] = ()
        """The full set that is coming or has come last, and its deltas."""
        self._changed = asyncio.Event()

    def announce(self, whole: Transfer, deltas: Iterable[Transfer]) -> None:
        """Announce the pieces of the next version; those of the version before stay so far."""
        announced = {transfer.key: transfer for transfer in (whole, *deltas)}
        self._coming = tuple(announced)
        self._transfers |= announced
        self._changed.set()
        self._changed = asyncio.Event()

    def commit(self) -> None:
        """Forget all pieces but those expected last: they have come."""
        self._transfers = {key: self._transfers[key] for key in self._coming}

    def discard(self) -> None:
        """Forget the pieces that were expected last, and tell whoever reads them."""
        for key in self._coming:
            self._transfers.pop(key).discard()
        self._coming = ()

    async def find(self, key: TransferKey, patience_s: float) -> Transfer:
        """Return a transfer, waiting up to `patience_s` for a version not heard of yet.

        Raises:
            NotFoundError: when it is not here and will not come.
        """
        try:
            async with asyncio.timeout(patience_s):
                while key not in self._transfers and not self._has_passed(key):
                    await self._changed.wait()
        except TimeoutError:
            pass
        if key not in self._transfers:
            raise NotFoundError("policy: these weights are not held here; ask the learner")
        return self._transfers[key]

    def _has_passed(self, key: TransferKey) -> bool:
        """Whether the version asked for, or a later one, is known without this transfer."""
        return any(
            coming.incarnation == key.incarnation and coming.policy_version >= key.policy_version
            for coming in self._coming
        )
