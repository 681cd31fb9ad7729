"""A learner's service that fails as a test says, and a client of it."""

import asyncio

from tests.fixtures.rollout.worker import quick_retries, serve_services
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient

HELD = HeldPolicy(incarnation="now", policy_version=0)


class FailingLearner(work_pb2_grpc.WorkServiceServicer, policy_pb2_grpc.PolicyServiceServicer):
    """Fails each call with the next of its failures, and succeeds when there are none left.

    Once it has no failure left, a call of `Lease` waits for the event `succeeds`.
    """

    def __init__(self, *failures):
        self.failures = list(failures)
        self.succeeds = asyncio.Event()
        self.succeeds.set()
        self.requests = []

    def _met(self, request):
        self.requests.append(request)
        if self.failures:
            raise self.failures.pop(0)

    async def Lease(self, request, context):  # noqa: N802 - named by the contract
        self._met(request)
        await self.succeeds.wait()
        return work_pb2.LeaseResponse(
            phase=work_pb2.RUN_PHASE_DRAINING, retry_after_seconds=0.25, leases=[work_pb2.Lease()]
        )

    async def Release(self, request, context):  # noqa: N802 - named by the contract
        self._met(request)
        return work_pb2.ReleaseResponse(num_released=1)

    async def Submit(self, request, context):  # noqa: N802 - named by the contract
        self._met(request)
        ended = work_pb2.SUBMIT_OUTCOME_LEASE_ENDED
        outcomes = [work_pb2.SUBMIT_OUTCOME_ACCEPTED] * len(request.trajectories)
        return work_pb2.SubmitResponse(outcomes=outcomes if len(self.requests) == 1 else [ended])

    async def GetManifest(self, request, context):  # noqa: N802 - named by the contract
        self._met(request)
        return policy_pb2.PolicyManifest(policy_version=3)


def channel_to(failing):
    """A channel to the failing server."""
    return serve_services(
        lambda server: work_pb2_grpc.add_WorkServiceServicer_to_server(failing, server),
        lambda server: policy_pb2_grpc.add_PolicyServiceServicer_to_server(failing, server),
    )


def learner_at(channel, **settings):
    settings = {"retries": quick_retries(), **settings}
    return LearnerClient(channel, worker_id="w", rollout_group="main", **settings)
