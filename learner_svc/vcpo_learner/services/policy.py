"""`PolicyService`: describes the newest policy version, says where to fetch it, and sends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from vcpo.metrics.label_values import WeightForm
from vcpo.wire.checks import check_id, check_wait
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.services.callers import Callers
from vcpo_learner.telemetry.traces import TrajectoryTraces
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.peer_assignment import PeerAssignment, serving_address
from vcpo_learner.weights.published_set import PublishedSet
from vcpo_learner.weights.store import PolicyStore, PublishedDelta, PublishedPolicy

_MAX_PORT = 65_535


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """Serves the policy store and assigns peers to the workers."""

    def __init__(
        self,
        store: PolicyStore,
        peers: PeerAssignment,
        archive_writer: ArchiveWriter | None = None,
        traces: TrajectoryTraces | None = None,
        callers: Callers | None = None,
    ) -> None:
        """Serve a store.

        callers: those of the learner's other services; None binds no name to a key.
        """
        self._traces = traces or TrajectoryTraces()
        self._store = store
        self._peers = peers
        self._callers = callers
        self._archive_writer = archive_writer
        self.served_bytes: Counter[WeightForm] = Counter()
        """Bytes sent so far, by form."""

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

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a full set or a delta from an offset.

        A full set may be patched meanwhile; each chunk says up to which version.
        """
        self._admit(request.worker_id, context)
        incarnation, version = request.incarnation, request.policy_version
        source: PublishedDelta | PublishedSet
        if request.HasField("base_policy_version"):
            form = WeightForm.DELTA
            source = self._store.get_delta(incarnation, version, request.base_policy_version)
        else:
            form = WeightForm.FULL
            source = self._store.get(incarnation, version).full_set
        if request.offset >= source.size_bytes:
            raise InvalidMessageError("offset", request.offset, f"less than {source.size_bytes}")
        for offset in range(request.offset, source.size_bytes, CHUNK_BYTES):
            data, newest_version = source.read(offset, CHUNK_BYTES)
            yield policy_pb2.PolicyChunk(policy_version=newest_version, offset=offset, data=data)
            self.served_bytes[form] += len(data)

    def _admit(self, worker_id: str, context: Any) -> None:
        if self._callers is None:
            check_id("worker_id", worker_id)
        else:
            self._callers.admit(worker_id, context)

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
        archived = self._archive_writer.archived if self._archive_writer else None
        again = self._peers.is_assigned(request.worker_id, newest)
        if archived is not None and archived.policy_version == newest and not (deltas or again):
            manifest.archived.CopyFrom(archived)
        base_version = held if deltas else None
        manifest.peer = self._peers.assign(
            request.worker_id, policy_version=newest, base_version=base_version
        )
        if manifest.peer:
            others = self._peers.fallbacks(request.worker_id, base_version=base_version)
            manifest.other_peers.extend(one for one in others if one != manifest.peer)
        return manifest

    def _held_version(self, request: policy_pb2.GetManifestRequest) -> int | None:
        """Return the version of this learner's incarnation that the caller holds, if any."""
        if not request.HasField("held_policy_version"):
            return None
        same = request.held_incarnation == self._store.incarnation
        return request.held_policy_version if same else None
