"""`PolicyService`: describes the newest policy version, and says where its files are."""

from __future__ import annotations

from typing import Any

from vcpo.wire.checks import check_wait
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.services.callers import Callers
from vcpo_learner.weights.store import PolicyStore


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """Describes the policy store's newest version, the same to every worker."""

    def __init__(self, store: PolicyStore, registry: WorkerRegistry, callers: Callers) -> None:
        self._store = store
        self._registry = registry
        self._callers = callers

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version; wait for one that the caller does not hold."""
        self._callers.admit(request.worker_id, context)
        self._registry.record_weights_call(request.worker_id)
        holds_one = request.HasField("held_policy_version")
        policy = await self._store.wait_for_newest(
            held_incarnation=request.held_incarnation,
            held_version=request.held_policy_version if holds_one else None,
            wait_s=check_wait("wait_seconds", request.wait_seconds),
        )
        return policy.manifest
