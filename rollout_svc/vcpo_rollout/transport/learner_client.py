"""The worker's view of the learner: typed calls with deadlines, repeated while it makes sense."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from vcpo.wire.failures import Failure, failure_to_message
from vcpo.wire.limits import CALL_TIMEOUT_S, MAX_PARTIAL_TOKENS, SUBMIT_BYTES
from vcpo.wire.phase import RunPhase, phase_from_message
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_to_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo_rollout.transport.retries import LearnerFailedError, Retries
from vcpo_rollout.transport.stream import receive_rest
from vcpo_rollout.transport.transfer_buffer import Transfer

_LOGGER = logging.getLogger(__name__)


class SubmissionRefusedError(RuntimeError):
    """The learner found trajectories malformed, and says how; sending them again is no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPolicy:
    """The version a worker samples from."""

    incarnation: str
    policy_version: int

    @classmethod
    def from_manifest(cls, manifest: policy_pb2.PolicyManifest) -> Self:
        """Return the version that a manifest describes."""
        return cls(incarnation=manifest.incarnation, policy_version=manifest.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseResult:
    """What the learner had to give."""

    leases: tuple[work_pb2.Lease, ...]
    phase: RunPhase
    retry_after_s: float
    """When there was nothing: how long to wait before asking again, unless new weights arrive."""


class LearnerClient:
    """Calls to the learner.

    Failed calls are repeated as `vcpo_rollout.transport.retries` says. Every call raises:
        LearnerFailedError: when the learner or the way to it is at fault, time after time.
        grpc.aio.AioRpcError: when the learner refuses the request for good.

    serving_port: Where this worker passes weights on to others; 0 when it does not.
    submit_bytes: Size at which a group is split into several submissions.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        worker_id: str,
        rollout_group: str,
        serving_port: int = 0,
        retries: Retries | None = None,
        submit_bytes: int = SUBMIT_BYTES,
    ) -> None:
        self._submit_bytes = submit_bytes
        self._retries = retries or Retries()
        self._worker_id = worker_id
        self._rollout_group = rollout_group
        self._serving_port = serving_port
        self._work = work_pb2_grpc.WorkServiceStub(channel)
        self._policy = policy_pb2_grpc.PolicyServiceStub(channel)

    async def lease(
        self,
        *,
        held: HeldPolicy,
        max_trajectories: int,
        wait_s: float,
        weight_updates_in_flight: int = 0,
        held_lease_ids: Collection[str] = (),
    ) -> LeaseResult:
        """Ask for prompts, waiting at the learner up to `wait_s` for some to become admissible.

        held_lease_ids: Leases under way; the learner gives the others of this worker to somebody
            else.
        """
        request = work_pb2.LeaseRequest(
            worker_id=self._worker_id,
            rollout_group=self._rollout_group,
            incarnation=held.incarnation,
            held_policy_version=held.policy_version,
            max_trajectories=max_trajectories,
            wait_seconds=wait_s,
            weight_updates_in_flight=weight_updates_in_flight,
            held_leases=work_pb2.HeldLeases(lease_ids=held_lease_ids),
        )
        response = await self._retries.run(
            "Lease", lambda: self._work.Lease(request, timeout=CALL_TIMEOUT_S + wait_s)
        )
        return LeaseResult(
            leases=tuple(response.leases),
            phase=phase_from_message(response.phase),
            retry_after_s=response.retry_after_seconds,
        )

    async def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> int:
        """Hand in trajectories; returns how many the learner took (again).

        Raises:
            SubmissionRefusedError: when the learner will not have them, whoever sends them.
        """
        taken = 0
        all_messages = [trajectory_to_message(one) for one in trajectories]
        for messages in _split(all_messages, self._submit_bytes):
            request = work_pb2.SubmitRequest(
                worker_id=self._worker_id, lease_id=lease_id, trajectories=messages
            )
            response = await self._submit(request)
            taken += sum(
                outcome != work_pb2.SUBMIT_OUTCOME_LEASE_ENDED for outcome in response.outcomes
            )
        return taken

    async def report_failure(self, lease_id: str, failure: Failure) -> None:
        """Say that a prompt could not be answered, and why."""
        await self._submit(
            work_pb2.SubmitRequest(
                worker_id=self._worker_id,
                lease_id=lease_id,
                failure=failure_to_message(failure),
            )
        )

    async def release(self, lease_id: str, partial_responses: Sequence[PartialResponse]) -> None:
        """Hand back one lease, with what was sampled of its answers.

        Of more than a message may hold, the longest are kept. What the learner refuses is given
        up, and the lease expires.
        """
        request = work_pb2.ReleaseRequest(
            worker_id=self._worker_id,
            lease_ids=[lease_id],
            begun=[
                partial_to_message(one) for one in _longest(partial_responses, MAX_PARTIAL_TOKENS)
            ],
        )
        try:
            await self._retries.run(
                "Release", lambda: self._work.Release(request, timeout=CALL_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as error:
            _LOGGER.warning("%s was not handed back, it will expire: %s", lease_id, error.details())

    async def preempted_leases(
        self, known_lease_ids: Collection[str], *, wait_s: float
    ) -> frozenset[str]:
        """Ids of leases to cut and hand back, waiting up to `wait_s` for one not heard of."""
        request = work_pb2.RecallRequest(
            worker_id=self._worker_id, heard_lease_ids=known_lease_ids, wait_seconds=wait_s
        )
        response = await self._retries.run(
            "Recall", lambda: self._work.Recall(request, timeout=CALL_TIMEOUT_S + wait_s)
        )
        return frozenset(response.lease_ids)

    async def release_everything(self) -> None:
        """Hand back whatever is held; best effort, since leases expire anyway."""
        request = work_pb2.ReleaseRequest(worker_id=self._worker_id)
        try:
            await self._work.Release(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            _LOGGER.info("leases were not handed back, they will expire: %s", said)

    async def newest_policy(
        self, held: HeldPolicy | None, *, wait_s: float
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version, waiting up to `wait_s` for one that is not held."""
        request = policy_pb2.GetManifestRequest(
            worker_id=self._worker_id,
            held_policy_version=held.policy_version if held else None,
            held_incarnation=held.incarnation if held else "",
            wait_seconds=wait_s,
            serving_port=self._serving_port,
        )
        return await self._retries.run(
            "GetManifest",
            lambda: self._policy.GetManifest(request, timeout=CALL_TIMEOUT_S + wait_s),
            also={grpc.StatusCode.NOT_FOUND},
        )

    async def fetch(self, transfer: Transfer) -> bool:
        """Receive the rest of a transfer, and repeat broken calls; False if the version is retired.

        Raises:
            CorruptWeightsError: when the chunks do not fit together.
        """
        while True:
            num_before = transfer.num_arrived
            try:
                await self._retries.run(
                    "Fetch", lambda: receive_rest(self._policy, self._worker_id, transfer)
                )
            except LearnerFailedError:
                if transfer.num_arrived == num_before:
                    raise
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return False
                raise
            else:
                return True

    async def _submit(self, request: work_pb2.SubmitRequest) -> work_pb2.SubmitResponse:
        try:
            return await self._retries.run(
                "Submit", lambda: self._work.Submit(request, timeout=CALL_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise SubmissionRefusedError(error.details()) from error
            raise


def _longest(
    partial_responses: Sequence[PartialResponse], limit_tokens: int
) -> list[PartialResponse]:
    """The longest answers that together hold at most `limit_tokens` tokens."""
    kept = []
    for one in sorted(partial_responses, key=lambda one: len(one.token_ids), reverse=True):
        limit_tokens -= len(one.token_ids)
        if limit_tokens < 0:
            break
        kept.append(one)
    return kept


def _split(
    messages: Sequence[work_pb2.Trajectory], limit_bytes: int
) -> list[list[work_pb2.Trajectory]]:
    """Cut a group into submissions of up to `limit_bytes`, of at least one trajectory each."""
    parts: list[list[work_pb2.Trajectory]] = [[]]
    size_bytes = 0
    for message in messages:
        if parts[-1] and size_bytes + message.ByteSize() > limit_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(message)
        size_bytes += message.ByteSize()
    return parts
