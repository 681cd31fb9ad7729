"""Fetches one shard of versions: its full set, or deltas that patch the set held here.

```
manifest --deltas start at the held version--> fetch them, patch the full set -+-> verify all
         --otherwise-------------------------> fetch the full set -------------+   tensors
```

The manifest describes the full set. Every tensor of it is verified, whoever sent the bytes and in
whatever form. Peers can read the bytes while they arrive.

There is one full set of a shard in memory. A sender may patch its own while it sends it, and then
says so. What arrived is a mixture up to that version, and is verified when the deltas to it are
applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vcpo.wire.deltas import check_chain
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, verify
from vcpo_rollout.transport.learner_client import HeldPolicy
from vcpo_rollout.transport.retries import UnreachableError
from vcpo_rollout.transport.transfer_buffer import Transfer, TransferCache, TransferKey
from vcpo_rollout.weights.deltas import apply_deltas
from vcpo_rollout.weights.senders import WeightSenders


@dataclass(slots=True, kw_only=True)
class _FullSet:
    """The full set that the next deltas patch."""

    policy: HeldPolicy
    """Version that the deltas start from."""
    whole: Transfer
    is_verified: bool = False
    """False if it is a mixture of this version and later ones."""
    senders: set[str] = field(default_factory=set)
    """Addresses of the peers that sent bytes which are not verified yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """How the shards of one version are to be fetched."""

    peers: Sequence[str]
    """Addresses of workers, in the order in which they are asked."""
    deadline_s: float
    """Until when they are asked, as `WeightSenders.deadline_s`."""
    turns: asyncio.Semaphore
    """Bounds the shards that arrive at one time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardVersion:
    """A shard of a version, complete and verified."""

    payload: bytearray
    """The full set in memory, which the next version patches."""
    base_policy_version: int | None = None
    """The verified version that was patched; None if that is unknown."""
    positions: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """What differs from the base, by tensor: rising positions in the shard's flat tensor."""


class ShardFetcher:
    """Brings one shard to versions, and serves it to peers. Owner: the worker's event loop."""

    def __init__(self, shard: int, senders: WeightSenders, cache: TransferCache) -> None:
        self._shard = shard
        self._senders = senders
        self._cache = cache
        self._full_set: _FullSet | None = None
        self._unfinished: Sequence[Transfer] = ()
        """Those whose sender cannot be reached."""

    @property
    def base(self) -> HeldPolicy | None:
        """The version that the next deltas have to start from; None if there is no full set."""
        return None if self._full_set is None else self._full_set.policy

    async def fetch(
        self, manifest: policy_pb2.PolicyManifest, plan: FetchPlan
    ) -> ShardVersion | None:
        """Bring the shard to a version; None if the caller must ask for a manifest again.

        It must if the learner retired it in the meantime, if its server cannot be reached, or if
        a sender patched it.

        manifest: of this shard.

        Raises:
            CorruptWeightsError: when the received bytes are not that version; names the tensor.
        """
        policy, full_set = HeldPolicy.from_manifest(manifest), self._full_set
        if full_set is not None and full_set.policy == policy:
            whole = full_set.whole
            return ShardVersion(payload=whole.buffer) if full_set.is_verified else None
        keeps_announced = False
        arriving: Sequence[Transfer] = ()
        try:
            deltas = self._deltas(manifest)
            if not deltas or full_set is None:
                whole = self._transfer(_key(manifest), manifest.total_bytes)
                full_set = _FullSet(policy=policy, whole=whole)
            arriving = deltas or [full_set.whole]
            for transfer in self._unfinished:
                if all(transfer is not each for each in arriving):
                    transfer.discard()
            self._unfinished = ()
            self._cache.announce(self._shard, arriving)
            if await self._receive(manifest, full_set, deltas, plan):
                keeps_announced = True
                return await self._take(manifest, full_set, deltas)
        except UnreachableError:
            keeps_announced = True
            self._unfinished = arriving
        except CorruptWeightsError:
            self._full_set = None  # the next fetch brings a whole set
            raise
        finally:
            if not keeps_announced:
                self._unfinished = ()
                self._cache.discard(self._shard)
        return None

    def _deltas(self, manifest: policy_pb2.PolicyManifest) -> list[Transfer]:
        """Return transfers for the deltas from the held version; none: fetch the full set.

        The learner was told the oldest version of all shards, so this one may be further.

        Raises:
            CorruptWeightsError: when the deltas do not lead from the held version to the new one.
        """
        held = self.base
        if held is None or held.incarnation != manifest.incarnation:
            return []
        bases = [each.base_policy_version for each in manifest.deltas]
        is_known = held.policy_version in bases
        later = manifest.deltas[bases.index(held.policy_version) if is_known else 0 :]
        if later:
            check_chain(
                later,
                base_policy_version=held.policy_version,
                policy_version=manifest.policy_version,
            )
        return [self._transfer(_key(manifest, each), each.total_bytes) for each in later]

    def _transfer(self, key: TransferKey, total_bytes: int) -> Transfer:
        """Return the transfer of a key, with the bytes that a lost sender left."""
        for transfer in self._unfinished:
            if transfer.key == key and transfer.total_bytes == total_bytes:
                return transfer
        return Transfer(key, total_bytes)

    async def _receive(
        self,
        manifest: policy_pb2.PolicyManifest,
        full_set: _FullSet,
        deltas: Sequence[Transfer],
        plan: FetchPlan,
    ) -> bool:
        """Complete the deltas, or the full set if there are none; False if they are retired."""
        async with plan.turns:
            if not deltas:
                await self._senders.read_archive(manifest, full_set.whole)
            senders: set[str] = set()
            for transfer in deltas or [full_set.whole]:
                if not await self._senders.complete(
                    transfer,
                    peers=plan.peers,
                    address=manifest.address,
                    deadline_s=plan.deadline_s,
                    senders=senders,
                ):
                    return False
        full_set.senders |= senders
        return True

    async def _take(
        self,
        manifest: policy_pb2.PolicyManifest,
        full_set: _FullSet,
        deltas: Sequence[Transfer],
    ) -> ShardVersion | None:
        """Bring the full set to the manifest's version; None if later deltas have to follow.

        Raises:
            CorruptWeightsError: when it is not that version. It is not used any more.
        """
        whole, version = full_set.whole, manifest.policy_version
        whole.newest_version = max(whole.newest_version, version)
        self._full_set, is_good = None, False  # a set that is half patched is no base
        try:
            patched = await asyncio.to_thread(_patched, manifest, full_set, deltas)
            is_good = True
        except CorruptWeightsError:
            self._senders.avoid(full_set.senders)
            raise
        finally:
            if not is_good:
                self._cache.discard(self._shard, whole)
        whole.policy_version = version
        self._cache.commit(whole)
        is_verified = patched is not None
        self._full_set = _FullSet(
            policy=HeldPolicy.from_manifest(manifest),
            whole=whole,
            is_verified=is_verified,
            senders=set() if is_verified else full_set.senders,
        )
        return patched


def _key(
    manifest: policy_pb2.PolicyManifest, delta: policy_pb2.DeltaEntry | None = None
) -> TransferKey:
    return TransferKey(
        incarnation=manifest.incarnation,
        policy_version=delta.policy_version if delta else manifest.policy_version,
        base_policy_version=delta.base_policy_version if delta else None,
        shard=manifest.shard,
    )


def _patched(
    manifest: policy_pb2.PolicyManifest, full_set: _FullSet, deltas: Sequence[Transfer]
) -> ShardVersion | None:
    """Write complete deltas into a full set and verify it; None if it cannot be verified yet.

    Raises:
        CorruptWeightsError: when the result is not the manifest's version.
    """
    payload, version = full_set.whole.buffer, manifest.policy_version
    positions = apply_deltas(payload, [delta.buffer for delta in deltas])
    if deltas and full_set.whole.newest_version > version + 1:
        # The learner patches its set with the next version before it announces that one.
        raise CorruptWeightsError(
            f"payload: a sender says that it holds version {full_set.whole.newest_version}, but the"
            f" newest one is {version}"
        )
    if full_set.whole.newest_version > version:
        return None
    verify(payload, manifest)
    if not deltas or not full_set.is_verified:
        return ShardVersion(payload=payload)
    base_version = full_set.policy.policy_version
    return ShardVersion(payload=payload, base_policy_version=base_version, positions=positions)
