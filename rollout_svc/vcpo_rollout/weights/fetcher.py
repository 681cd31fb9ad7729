"""Fetches the version that a manifest describes: the full set, or deltas to the one held here.

```
manifest --deltas start at the held version--> fetch them, patch the full set -+-> verify all
         --otherwise-------------------------> fetch the full set -------------+   tensors
```

The manifest describes the full set. Every tensor of it is verified, whoever sent the bytes and in
whatever form. Peers can read the bytes while they arrive. This module does not touch the engine.

There is one full set in memory. A sender may patch its own while it sends it, and then says so.
What arrived is a mixture up to that version, and is verified when the deltas to it are applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from vcpo.wire.deltas import check_chain
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, verify
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.peer_client import PeerClient
from vcpo_rollout.transport.transfer_buffer import Transfer, TransferCache, TransferKey
from vcpo_rollout.weights.archive import ArchiveReader
from vcpo_rollout.weights.deltas import apply_deltas


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


class WeightFetcher:
    """Fetches and verifies versions, and serves them to peers. Owner: the worker's event loop.

    The payload that it returns is the full set in memory, which the next `fetch` patches.

    peers: Asked before the learner; None asks no peer.
    archive: Read first for full sets, if the manifest says that they are archived.
    """

    def __init__(
        self,
        learner: LearnerClient,
        gauges: RolloutGauges,
        *,
        cache: TransferCache | None = None,
        peers: PeerClient | None = None,
        archive: ArchiveReader | None = None,
    ) -> None:
        self._learner = learner
        self._gauges = gauges
        self._cache = cache or TransferCache()
        self._peers = peers
        self._archive = archive
        self._full_set: _FullSet | None = None

    @property
    def base(self) -> HeldPolicy | None:
        """The version that the next deltas have to start from; None if there is no full set."""
        return None if self._full_set is None else self._full_set.policy

    async def fetch(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None if there is a newer version to ask for.

        That is so if the learner retired it in the meantime, or a sender patched it.

        Raises:
            CorruptWeightsError: when the received bytes are not that version; names the tensor.
        """
        deltas = [Transfer(_key(manifest, entry), entry.total_bytes) for entry in manifest.deltas]
        is_here = False
        try:
            if deltas:
                full_set = self._base_of(manifest)
            else:
                whole = Transfer(_key(manifest), manifest.total_bytes)
                full_set = _FullSet(policy=HeldPolicy.from_manifest(manifest), whole=whole)
            arriving = deltas or [full_set.whole]
            self._cache.announce(arriving)
            if not deltas:
                await self._read_archive(manifest, full_set.whole)
            senders: set[str] = set()
            is_here = await self._receive(arriving, manifest, senders)
            if not is_here:
                return None
            full_set.senders |= senders
            return await self._take(manifest, full_set, deltas)
        except CorruptWeightsError:
            self._full_set = None  # the next fetch brings a whole set
            raise
        finally:
            if not is_here:
                self._cache.discard()

    async def _take(
        self,
        manifest: policy_pb2.PolicyManifest,
        full_set: _FullSet,
        deltas: Sequence[Transfer],
    ) -> PolicyWeights | None:
        """Bring the full set to the manifest's version; None if later deltas have to follow.

        Raises:
            CorruptWeightsError: when it is not that version. It is not used any more.
        """
        whole, version = full_set.whole, manifest.policy_version
        whole.newest_version = max(whole.newest_version, version)
        self._full_set, is_good = None, False  # a set that is half patched is no base
        try:
            weights = await asyncio.to_thread(_patched, manifest, full_set, deltas)
            is_good = True
        except CorruptWeightsError:
            for address in full_set.senders:
                assert self._peers is not None
                self._peers.avoid(address, "corrupt")
            raise
        finally:
            if not is_good:
                self._cache.discard(whole)
        whole.policy_version = version
        self._cache.commit(whole)
        is_verified = weights is not None
        self._full_set = _FullSet(
            policy=HeldPolicy.from_manifest(manifest),
            whole=whole,
            is_verified=is_verified,
            senders=set() if is_verified else full_set.senders,
        )
        return weights

    def _base_of(self, manifest: policy_pb2.PolicyManifest) -> _FullSet:
        """Return the full set to which the manifest's deltas apply."""
        full_set = self._full_set
        if full_set is None or full_set.policy.incarnation != manifest.incarnation:
            raise CorruptWeightsError("delta: starts from a version that is not held here")
        check_chain(
            manifest.deltas,
            base_policy_version=full_set.policy.policy_version,
            policy_version=manifest.policy_version,
        )
        return full_set

    async def _read_archive(self, manifest: policy_pb2.PolicyManifest, whole: Transfer) -> None:
        if self._archive is None or not manifest.HasField("archived"):
            return
        found = await self._archive.full_set(manifest)
        if found is not None:
            payload, num_bytes = found
            whole.fill(payload)
            self._gauges.add_weight_bytes("archive", num_bytes)

    async def _receive(
        self,
        transfers: Sequence[Transfer],
        manifest: policy_pb2.PolicyManifest,
        senders: set[str],
    ) -> bool:
        """Complete transfers from the peers, and from the learner what the peers do not send.

        senders: gets the addresses of the peers that sent bytes.

        Returns: False if the version is retired.
        """
        addresses = [manifest.peer, *manifest.other_peers] if manifest.peer else []
        total_bytes = sum(transfer.total_bytes for transfer in transfers)
        deadline_s = self._peers.deadline_s(total_bytes) if self._peers else 0.0
        for transfer in transfers:
            for address in addresses:
                if self._peers is None or transfer.is_complete:
                    break
                if num_bytes := await self._peers.fetch(address, transfer, deadline_s=deadline_s):
                    self._gauges.add_weight_bytes("peer", num_bytes)
                    senders.add(address)
            num_before = transfer.num_arrived
            if not transfer.is_complete and not await self._learner.fetch(transfer):
                return False
            self._gauges.add_weight_bytes("learner", transfer.num_arrived - num_before)
        return True


def _key(
    manifest: policy_pb2.PolicyManifest, delta: policy_pb2.DeltaEntry | None = None
) -> TransferKey:
    return TransferKey(
        incarnation=manifest.incarnation,
        policy_version=delta.policy_version if delta else manifest.policy_version,
        base_policy_version=delta.base_policy_version if delta else None,
    )


def _patched(
    manifest: policy_pb2.PolicyManifest, full_set: _FullSet, deltas: Sequence[Transfer]
) -> PolicyWeights | None:
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
    changes = None
    if deltas and full_set.is_verified:
        base_version = full_set.policy.policy_version
        changes = WeightChanges(base_policy_version=base_version, positions=positions)
    return PolicyWeights(policy_version=version, payload=payload, changes=changes)
