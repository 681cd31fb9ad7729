"""Who sends weights: other workers, then the learner; for whole shards the archive before both."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vcpo.wire.v1 import policy_pb2
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.transport.peer_client import PeerClient
from vcpo_rollout.transport.transfer_buffer import Transfer
from vcpo_rollout.weights.archive import ArchiveReader


class WeightSenders:
    """Completes transfers, and counts what came from whom.

    peers: Asked before the learner; None asks no peer.
    archive: Read first for full sets, if the manifest says that they are archived.
    """

    def __init__(
        self,
        learner: LearnerClient,
        gauges: RolloutGauges,
        *,
        peers: PeerClient | None = None,
        archive: ArchiveReader | None = None,
    ) -> None:
        self._learner = learner
        self._gauges = gauges
        self._peers = peers
        self._archive = archive

    def deadline_s(self, num_bytes: int) -> float:
        """Return the time by which all peers must have sent the bytes; `complete` takes it."""
        return self._peers.deadline_s(num_bytes) if self._peers else 0.0

    async def read_archive(self, manifest: policy_pb2.PolicyManifest, whole: Transfer) -> None:
        """Fill a full set of which nothing has arrived, if the archive has it."""
        if self._archive is None or not manifest.HasField("archived") or whole.num_arrived:
            return
        found = await self._archive.full_set(manifest)
        if found is not None:
            payload, num_bytes = found
            whole.fill(payload)
            self._gauges.add_weight_bytes("archive", num_bytes)

    async def complete(
        self,
        transfer: Transfer,
        *,
        peers: Sequence[str],
        address: str,
        deadline_s: float,
        senders: set[str],
    ) -> bool:
        """Complete a transfer from peers, and from the learner what they do not send.

        peers: asked in this order.
        address: the learner's server that sends it, as in a manifest.
        senders: gets the addresses of the peers that sent bytes.

        Returns: False if the learner does not hold it any more.

        Raises:
            UnreachableError: when the learner's server cannot be reached; the bytes stay.
            CorruptWeightsError: when the chunks do not fit together.
        """
        for peer in peers:
            if self._peers is None or transfer.is_complete:
                break
            if num_bytes := await self._peers.fetch(peer, transfer, deadline_s=deadline_s):
                self._gauges.add_weight_bytes("peer", num_bytes)
                senders.add(peer)
        num_before = transfer.num_arrived
        try:
            return transfer.is_complete or await self._learner.fetch(transfer, address)
        finally:
            self._gauges.add_weight_bytes("learner", transfer.num_arrived - num_before)

    def avoid(self, addresses: Collection[str]) -> None:
        """Do not ask peers for a while, whose bytes were corrupt."""
        for address in addresses:
            assert self._peers is not None
            self._peers.avoid(address, "corrupt")
