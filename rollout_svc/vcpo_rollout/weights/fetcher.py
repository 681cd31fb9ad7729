"""Fetches the version that a manifest describes: the full set, or deltas to the version held here.

```
manifest --deltas start at the held version--> fetch them, apply to a copy -+-> verify all tensors
         --otherwise-------------------------> fetch the full set ----------+
```

The manifest describes the full set. Every tensor of it is verified, whoever sent the bytes and in
whatever form. Peers can read the bytes while they arrive. This module does not touch the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldSet:
    policy: HeldPolicy
    payload: bytes


class WeightFetcher:
    """Fetches and verifies versions, and serves them to peers. Owner: the worker's event loop.

    It keeps the newest full set, to which the next deltas apply.

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
        self._held: _HeldSet | None = None

    async def fetch(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None if the learner retired it in the meantime.

        Raises:
            CorruptWeightsError: when the received bytes are not that version; names the tensor.
        """
        base = self._base_of(manifest) if manifest.deltas else None
        whole = Transfer(_key(manifest), manifest.total_bytes)
        deltas = [Transfer(_key(manifest, entry), entry.total_bytes) for entry in manifest.deltas]
        self._cache.announce(whole, deltas)
        weights = None
        try:
            await self._read_archive(manifest, whole)
            senders = await self._receive(deltas or [whole], manifest)
            if senders is not None:
                try:
                    weights = await asyncio.to_thread(_build, manifest, base, whole, deltas)
                except CorruptWeightsError:
                    for address in senders:
                        assert self._peers is not None
                        self._peers.avoid(address, "corrupt")
                    raise
                policy = HeldPolicy.from_manifest(manifest)
                self._held = _HeldSet(policy=policy, payload=weights.payload)
        finally:
            if weights is None:
                self._cache.discard()
        if weights is not None:
            whole.fill(weights.payload)
            self._cache.commit()
        return weights

    def _base_of(self, manifest: policy_pb2.PolicyManifest) -> _HeldSet:
        """Return the held set to which the manifest's deltas apply."""
        if self._held is None or self._held.policy.incarnation != manifest.incarnation:
            raise CorruptWeightsError("delta: starts from a version that is not held here")
        check_chain(
            manifest.deltas,
            base_policy_version=self._held.policy.policy_version,
            policy_version=manifest.policy_version,
        )
        return self._held

    async def _read_archive(self, manifest: policy_pb2.PolicyManifest, whole: Transfer) -> None:
        if self._archive is None or not manifest.HasField("archived"):
            return
        found = await self._archive.full_set(manifest)
        if found is not None:
            payload, num_bytes = found
            whole.fill(payload)
            self._gauges.add_weight_bytes("archive", num_bytes)

    async def _receive(
        self, transfers: Sequence[Transfer], manifest: policy_pb2.PolicyManifest
    ) -> set[str] | None:
        """Complete transfers from the peers, and from the learner what the peers do not send.

        Returns: the addresses of the peers that sent bytes; None if the version is retired.
        """
        senders = set()
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
                return None
            self._gauges.add_weight_bytes("learner", transfer.num_arrived - num_before)
        return senders


def _key(
    manifest: policy_pb2.PolicyManifest, delta: policy_pb2.DeltaEntry | None = None
) -> TransferKey:
    return TransferKey(
        incarnation=manifest.incarnation,
        policy_version=delta.policy_version if delta else manifest.policy_version,
        base_policy_version=delta.base_policy_version if delta else None,
    )


def _build(
    manifest: policy_pb2.PolicyManifest,
    base: _HeldSet | None,
    whole: Transfer,
    deltas: Sequence[Transfer],
) -> PolicyWeights:
    """Build the version's weights from complete transfers, and verify them.

    Raises:
        CorruptWeightsError: when they are not that version.
    """
    payload, changes = whole.content() if base is None else b"", None
    if base is not None:
        payload, positions = apply_deltas(base.payload, [delta.content() for delta in deltas])
        changes = WeightChanges(base_policy_version=base.policy.policy_version, positions=positions)
    verify(payload, manifest)
    return PolicyWeights(policy_version=manifest.policy_version, payload=payload, changes=changes)
