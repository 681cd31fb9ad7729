"""`PolicyService`: describes the newest policy version, says where to fetch it, and sends it.

Rank 0 has all of it; the other ranks that publish only send their shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vcpo.metrics.label_values import WeightForm
from vcpo.wire.checks import check_id, check_wait
from vcpo.wire.errors import InvalidMessageError, NotFoundError
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.services.callers import Callers
from vcpo_learner.telemetry.traces import TrajectoryTraces
from vcpo_learner.weight_server.held_files import chunks_of
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.peer_assignment import PeerAssignment, serving_address
from vcpo_learner.weights.store import PolicyStore, PublishedPolicy

_MAX_PORT = 65_535
_SERVED_HERE_VERSIONS = 16
"""Versions for which a worker that cannot reach the server of weights is not sent there."""


class ShardService(policy_pb2_grpc.PolicyServiceServicer):
    """Sends the shard of one rank."""

    def __init__(self, store: PolicyStore, shard: int, callers: Callers | None = None) -> None:
        """Serve a store that holds a shard.

        callers: those of the learner's other services; None binds no name to a key.
        """
        self._store = store
        self._shard = shard
        self._callers = callers
        self.served_bytes: Counter[WeightForm] = Counter()
        """Bytes that this service has sent so far, by form."""

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Refuse: only rank 0 describes versions."""
        raise NotFoundError("policy: this rank has no manifests; ask rank 0")

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a full set or a delta from an offset.

        A full set may be patched meanwhile; each chunk says up to which version.
        """
        self._admit(request.worker_id, context)
        if request.shard != self._shard:
            raise NotFoundError(f"shard: {request.shard} is sent by another server than this one")
        incarnation, version = request.incarnation, request.policy_version
        if request.HasField("base_policy_version"):
            form = WeightForm.DELTA
            base_version = request.base_policy_version
            file = self._store.get_delta(incarnation, version, base_version).file
        else:
            form = WeightForm.FULL
            file = self._store.get(incarnation, version).full_set.file
        async for chunk in chunks_of(file, request):
            yield chunk
            self.served_bytes[form] += len(chunk.data)

    def _admit(self, worker_id: str, context: Any) -> None:
        if self._callers is None:
            check_id("worker_id", worker_id)
        else:
            self._callers.admit(worker_id, context)


class PolicyService(ShardService):
    """Serves the policy store and assigns peers to the workers."""

    def __init__(
        self,
        store: PolicyStore,
        peers: PeerAssignment,
        archive_writer: ArchiveWriter | None = None,
        traces: TrajectoryTraces | None = None,
        callers: Callers | None = None,
        weight_server: WeightServer | None = None,
    ) -> None:
        """Serve a store, that of shard 0 if there are several; as `ShardService`.

        weight_server: sends the store's files from another process; None: this service does.
        """
        super().__init__(store, 0, callers)
        self._traces = traces or TrajectoryTraces()
        self._peers = peers
        self._archive_writer = archive_writer
        self._weight_server = weight_server
        self._served_here_until: dict[str, int] = {}
        """Workers that could not fetch from the server of weights: the version until which they
        are not sent there."""

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version; wait for one that the caller does not hold."""
        self._admit(request.worker_id, context)
        if request.serving_port > _MAX_PORT:
            raise InvalidMessageError("serving_port", request.serving_port, f"0 to {_MAX_PORT}")
        address = serving_address(context.peer(), request.serving_port)
        self._peers.register(request.worker_id, address, self._held_version(request))
        holds_one = request.HasField("held_policy_version")
        policy = await self._store.wait_for_newest(
            held_incarnation=request.held_incarnation,
            held_version=request.held_policy_version if holds_one else None,
            wait_s=check_wait("wait_seconds", request.wait_seconds),
        )
        return self._manifest_for(request, policy)

    def _manifest_for(
        self, request: policy_pb2.GetManifestRequest, policy: PublishedPolicy
    ) -> policy_pb2.PolicyManifest:
        """Return the manifest of a version, with deltas and sources for this caller.

        A caller that needs the full set is sent to the archive, if it holds the version and the
        caller asks for the first time.
        """
        newest = policy.policy_version
        held = self._held_version(request)
        if held == newest:
            return policy.manifest
        deltas = [] if held is None else self._store.deltas_from(request.held_incarnation, held)
        manifest = policy_pb2.PolicyManifest()
        manifest.CopyFrom(policy.manifest)
        manifest.traceparent = self._traces.publication_of(newest)
        manifest.deltas.extend(delta.entry for delta in deltas)
        for shard in manifest.other_shards:
            chain = chain_from(held, shard.deltas)
            del shard.deltas[:]
            shard.deltas.extend(chain)
        archived = self._archive_writer.archived if self._archive_writer else None
        again = self._peers.is_assigned(request.worker_id, newest)
        if archived is not None and archived.policy_version == newest and not (deltas or again):
            manifest.archived.CopyFrom(archived)
        manifest.address = self._address(request.worker_id, newest, again=again)
        base_version = held if deltas else None
        manifest.peer = self._peers.assign(
            request.worker_id, policy_version=newest, base_version=base_version
        )
        if manifest.peer:
            others = self._peers.fallbacks(request.worker_id, base_version=base_version)
            manifest.other_peers.extend(one for one in others if one != manifest.peer)
        return manifest

    def _address(self, worker_id: str, policy_version: int, *, again: bool) -> str:
        """Return the address from which a worker fetches a version, unless from here.

        A worker that asks again for a version could not fetch it, whatever the reason was.
        """
        if self._weight_server is None:
            return ""
        if again:
            until = self._served_here_until
            kept = {name: version for name, version in until.items() if version > policy_version}
            self._served_here_until = {**kept, worker_id: policy_version + _SERVED_HERE_VERSIONS}
        if self._served_here_until.get(worker_id, 0) > policy_version:
            return ""
        return self._weight_server.address_of(policy_version)

    def _held_version(self, request: policy_pb2.GetManifestRequest) -> int | None:
        """Return the version of this learner's incarnation that the caller holds, if any."""
        if not request.HasField("held_policy_version"):
            return None
        same = request.held_incarnation == self._store.incarnation
        return request.held_policy_version if same else None


def chain_from(
    policy_version: int | None, deltas: Sequence[policy_pb2.DeltaEntry]
) -> list[policy_pb2.DeltaEntry]:
    """Return the deltas from a version on; none if no delta starts there.

    deltas: of one shard, each from the version that the one before it leads to.
    """
    bases = [delta.base_policy_version for delta in deltas]
    return list(deltas[bases.index(policy_version) :]) if policy_version in bases else []
