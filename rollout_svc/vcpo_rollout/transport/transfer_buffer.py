"""Buffers for weights in transit: full sets and deltas, complete or still arriving.

A peer can read a transfer while it arrives, so a worker relays weights without delay. No receiver
trusts the bytes: each checks the finished weights against the learner's manifest.

```
arriving ---> complete ---> patched in place      by the deltas to later versions
    |             |             |
    +-------------+-------------+---> discarded   broken off or corrupt; readers get an error
```

Who reads a full set while it is patched gets bytes of both versions, and is told the later one. The
deltas between them turn these bytes into the later version (`vcpo_learner.weights.published_set`).
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
        """Of a full set: with the version in which it arrived."""
        self.total_bytes = total_bytes
        self.buffer = bytearray(total_bytes)
        """The bytes, of which `num_arrived` have arrived."""
        self.num_arrived = 0
        self.policy_version = key.policy_version
        """Version of the bytes; of a full set, the last one that it was patched to."""
        self.newest_version = key.policy_version
        """Newest version of which bytes may be among them; whoever patches the set raises it
        first."""
        self._discarded = False
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.num_arrived == self.total_bytes

    def serves(self, key: TransferKey) -> bool:
        """Return whether these are the bytes of a key, or the full set of a later version."""
        if key.base_policy_version is not None or self.key.base_policy_version is not None:
            return key == self.key
        is_covered = self.key.policy_version <= key.policy_version <= self.policy_version
        return is_covered and key.incarnation == self.key.incarnation

    def extend(self, offset: int, data: bytes, newest_version: int = 0) -> None:
        """Append the bytes that follow those that have arrived.

        newest_version: newest version of which the sender may have sent bytes.

        Raises:
            CorruptWeightsError: when they do not follow, or exceed the total.
        """
        end = offset + len(data)
        if offset != self.num_arrived or end > self.total_bytes:
            raise CorruptWeightsError(
                f"chunk: bytes {offset} to {end} do not follow {self.num_arrived} of"
                f" {self.total_bytes}"
            )
        self.buffer[offset:end] = data
        self.num_arrived = end
        self.newest_version = max(self.newest_version, newest_version)
        self._notify_readers()

    def fill(self, content: bytearray) -> None:
        """Set all bytes at once; the transfer owns them from then on."""
        assert len(content) == self.total_bytes
        self.buffer = content
        self.num_arrived = self.total_bytes
        self._notify_readers()

    def discard(self) -> None:
        """Serve no further bytes; waiting readers get an error."""
        self._discarded = True
        self._notify_readers()

    async def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` from an offset once there are any; none at the end.

        Returns: also the newest version of which bytes may be among them.

        Raises:
            UnavailableError: when the transfer is discarded.
        """
        while not self._discarded and self.num_arrived <= offset < self.total_bytes:
            await self._changed.wait()
        if self._discarded:
            raise UnavailableError("policy: this worker discarded these weights; ask elsewhere")
        end = min(offset + max_bytes, self.num_arrived)
        # The version is read after the bytes, which a thread may be patching.
        return bytes(memoryview(self.buffer)[offset:end]), self.newest_version

    def _notify_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TransferCache:
    """The transfers that this worker serves to peers. Owner: the worker's event loop.

    It holds the full set and the deltas that patched it last. A reader of an evicted transfer can
    still read it to its end.
    """

    def __init__(self) -> None:
        self._held: tuple[Transfer, ...] = ()
        """The full set, and the deltas that led to it."""
        self._announced: tuple[Transfer, ...] = ()
        """Those of the next version."""
        self._changed = asyncio.Event()

    def announce(self, transfers: Iterable[Transfer]) -> None:
        """Add the transfers of the next version, a full set or deltas; keep the others."""
        self._announced = tuple(transfers)
        self._notify()

    def commit(self, whole: Transfer) -> None:
        """Evict all but the full set of the announced version, and its deltas."""
        deltas = [transfer for transfer in self._announced if transfer is not whole]
        self._held, self._announced = (whole, *deltas), ()
        self._notify()

    def discard(self, spoiled: Transfer | None = None) -> None:
        """Remove and discard the announced transfers.

        spoiled: a full set in which they were written; it goes as well.
        """
        for transfer in self._announced:
            transfer.discard()
        self._announced = ()
        if spoiled is not None:
            spoiled.discard()
            self._held = tuple(transfer for transfer in self._held if transfer is not spoiled)

    async def find(self, key: TransferKey, wait_s: float) -> Transfer:
        """Return a transfer; wait up to `wait_s` for a version that is not here yet.

        Raises:
            NotFoundError: when this worker neither holds nor expects it.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    for transfer in (*self._held, *self._announced):
                        if transfer.serves(key):
                            return transfer
                    if self._is_superseded(key):
                        break
                    await self._changed.wait()
        except TimeoutError:
            pass
        raise NotFoundError("policy: this worker does not hold these weights; ask the learner")

    def _is_superseded(self, key: TransferKey) -> bool:
        """Whether the key will not come: a later version is here, or its version by other deltas.

        The full set of the announced version comes when its deltas are applied.
        """
        newest = max(
            (
                transfer.policy_version
                for transfer in (*self._held, *self._announced)
                if transfer.key.incarnation == key.incarnation
            ),
            default=-1,
        )
        is_delta = key.base_policy_version is not None
        return newest >= key.policy_version if is_delta else newest > key.policy_version

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
