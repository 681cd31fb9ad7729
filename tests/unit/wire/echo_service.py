"""A service that echoes its request, and calls of it over a real channel."""

import grpc

from vcpo.wire.access.roles import CallerRole
from vcpo.wire.errors import InvalidMessageError, NotFoundError, UnavailableError
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc

SERVICE = "vcpo.wire.v1.PolicyService"


KEY = "right-key"
KEYS = {CallerRole.WORKER: KEY}


TIMEOUT_S = 30.0


_Context = grpc.aio.ServicerContext[object, object]


ERRORS = {
    "malformed": InvalidMessageError("worker_id", "malformed", "something else"),
    "gone": NotFoundError("policy_version: 3 is retired"),
    "busy": UnavailableError("the learner is starting"),
}


class Echo(policy_pb2_grpc.PolicyServiceServicer):
    """Answers with what it was asked for, or with the error named by the worker's id."""

    async def GetManifest(  # noqa: N802 - the name in the protocol
        self, request: policy_pb2.GetManifestRequest, context: _Context
    ) -> policy_pb2.PolicyManifest:
        if request.worker_id in ERRORS:
            raise ERRORS[request.worker_id]
        return policy_pb2.PolicyManifest(policy_version=request.held_policy_version)


async def manifest(channel: grpc.aio.Channel, worker_id: str = "w", **call: object) -> int:
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    request = policy_pb2.GetManifestRequest(worker_id=worker_id, held_policy_version=7)
    return (await stub.GetManifest(request, **{"timeout": TIMEOUT_S, **call})).policy_version
