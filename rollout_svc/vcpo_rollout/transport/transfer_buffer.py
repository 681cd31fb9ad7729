"""Buffers for weights in transit: full sets and deltas of shards, complete or still arriving.

A peer can read a transfer while it arrives, so a worker relays weights without delay. No receiver
trusts the bytes: each checks the finished weights against the learner's manifest.

```
arriving ---> complete ---> patched in place      by the deltas to later versions
    |             |             |
    +-------------+-------------+---> discarded   broken off or corrupt; readers get an error
```

A reader of a full set that is being patched gets bytes of two versions, and the number of the later
one. It applies the deltas between them, and then holds the later version
(`vcpo_learner.weights.published_set`).

A version in one piece is its shard 0. Shards know nothing of each other here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from vcpo.wire.errors import NotFoundError, UnavailableError
from vcpo.wire.weights import CorruptWeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identifies a full set or a delta of a shard."""

    incarnation: str
    policy_version: int
    base_policy_version: int | None
    """The version that a delta starts from; None for a full set."""
    shard: int = 0


class Transfer:
    """The bytes of one full set or delta, in order. Owner: the worker's event loop.

    Raises:
        CorruptWeightsError: when they do not fit into this machine's memory.
    """

    def __init__(self, key: TransferKey, total_bytes: int) -> None:
        self.key = key
        """Of a full set: with the version in which it arrived."""
        self.total_bytes = total_bytes
        try:
            self.buffer = bytearray(total_bytes)
        except (MemoryError, OverflowError) as error:
            raise CorruptWeightsError(
                f"total_bytes: must fit into memory, got {total_bytes}"
            ) from error
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
        is_same = key.incarnation == self.key.incarnation and key.shard == self.key.shard
        return is_covered and is_same

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


@dataclass(slots=True)
class _ShardTransfers:
    held: tuple[Transfer, ...] = ()
    """The full set, and the deltas that led to it."""
    announced: tuple[Transfer, ...] = ()
    """Those of the next version."""


class TransferCache:
    """The transfers that this worker serves to peers. Owner: the worker's event loop.

    It holds the full set of each shard and the deltas that patched it last. A reader of an evicted
    transfer can still read it to its end.
    """

    def __init__(self) -> None:
        self._shards: dict[int, _ShardTransfers] = {}
        self._changed = asyncio.Event()

    def announce(self, shard: int, transfers: Iterable[Transfer]) -> None:
        """Add the transfers of a shard's next version, a full set or deltas; keep the others."""
        self._shards.setdefault(shard, _ShardTransfers()).announced = tuple(transfers)
        self._notify()

    def commit(self, whole: Transfer) -> None:
        """Evict all of a shard but the full set of the announced version, and its deltas."""
        shard = self._shards.setdefault(whole.key.shard, _ShardTransfers())
        deltas = [transfer for transfer in shard.announced if transfer is not whole]
        shard.held, shard.announced = (whole, *deltas), ()
        self._notify()

    def discard(self, shard: int, spoiled: Transfer | None = None) -> None:
        """Remove and discard a shard's announced transfers.

        spoiled: a full set in which they were written; it goes as well.
        """
        transfers = self._shards.setdefault(shard, _ShardTransfers())
        for transfer in transfers.announced:
            transfer.discard()
        transfers.announced = ()
        if spoiled is not None:
            spoiled.discard()
            transfers.held = tuple(each for each in transfers.held if each is not spoiled)

    def drop(self, shard: int) -> None:
        """Remove and discard all of a shard."""
        self.discard(shard)
        for transfer in self._shards.pop(shard).held:
            transfer.discard()

    async def find(self, key: TransferKey, wait_s: float) -> Transfer:
        """Return a transfer; wait up to `wait_s` for a version that is not here yet.

        Raises:
            NotFoundError: when this worker neither holds nor expects it.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    shard = self._shards.get(key.shard, _ShardTransfers())
                    transfers = (*shard.held, *shard.announced)
                    for transfer in transfers:
                        if transfer.serves(key):
                            return transfer
                    if _is_superseded(key, transfers):
                        break
                    await self._changed.wait()
        except TimeoutError:
            pass
        raise NotFoundError("policy: this worker does not hold these weights; ask the learner")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _is_superseded(key: TransferKey, transfers: Iterable[Transfer]) -> bool:
    """Whether the key will not come: a later version is here, or its version by other deltas.

    The full set of the announced version comes when its deltas are applied.

    transfers: those of the key's shard.
    """
    newest = max(
        (each.policy_version for each in transfers if each.key.incarnation == key.incarnation),
        default=-1,
    )
    is_delta = key.base_policy_version is not None
    return newest >= key.policy_version if is_delta else newest > key.policy_version
