"""The client of the learner: typed calls with deadlines, which are retried where that can help."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo.service.lifecycle import peak_memory_bytes
from vcpo.wire.errors import SetAsideError
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
from vcpo_rollout.transport.retries import Retries

_LOGGER = logging.getLogger(__name__)


class SubmissionRefusedError(RuntimeError):
    """The learner refuses trajectories as malformed and names the field; a retry cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPolicy:
    """The version that a worker samples from."""

    incarnation: str
    policy_version: int

    @classmethod
    def from_manifest(cls, manifest: policy_pb2.PolicyManifest) -> Self:
        return cls(incarnation=manifest.incarnation, policy_version=manifest.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseResult:
    """The learner's response to a request for leases."""

    leases: tuple[work_pb2.Lease, ...]
    phase: RunPhase
    retry_after_s: float
    """Without leases: how long to wait before the next request, unless new weights arrive."""


class LearnerClient:
    """Calls to the learner, retried as `vcpo_rollout.transport.retries` describes.

    Every call raises:
        LearnerFailedError: when the learner or the network fails repeatedly.
        SetAsideError: when the learner has taken this worker out of the run.
        grpc.aio.AioRpcError: when the learner refuses the request.

    channel: To the learner.
    submit_bytes: Largest submission; a larger group is split into several.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        worker_id: str,
        rollout_group: str,
        retries: Retries | None = None,
        submit_bytes: int = SUBMIT_BYTES,
    ) -> None:
        self._submit_bytes = submit_bytes
        self._retries = retries or Retries()
        self._worker_id = worker_id
        self._process_id = secrets.token_hex(16)
        self._rollout_group = rollout_group
        self.on_preempted: Callable[[Collection[str]], None] = lambda _: None
        """Is told the leases that the learner preempts, each time it names some."""
        self._work = work_pb2_grpc.WorkServiceStub(channel)
        self._policy = policy_pb2_grpc.PolicyServiceStub(channel)

    async def lease(
        self,
        *,
        held: HeldPolicy,
        max_trajectories: int,
        wait_s: float,
        weight_updates: WeightUpdates = NO_UPDATES,
        held_lease_ids: Collection[str] = (),
    ) -> LeaseResult:
        """Request prompts. The learner waits up to `wait_s` until it can admit some.

        held_lease_ids: The leases that this worker works on. The learner ends its other leases and
            grants their prompts to another worker.
        """
        request = work_pb2.LeaseRequest(
            worker_id=self._worker_id,
            process_id=self._process_id,
            rollout_group=self._rollout_group,
            incarnation=held.incarnation,
            held_policy_version=held.policy_version,
            max_trajectories=max_trajectories,
            wait_seconds=wait_s,
            weight_updates_in_flight=weight_updates.in_flight,
            adapter_swaps=weight_updates.adapter_swaps,
            merged_versions=weight_updates.merged,
            peak_memory_bytes=peak_memory_bytes(),
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
        """Submit trajectories; return how many the learner accepted, now or in an earlier call.

        Raises:
            SubmissionRefusedError: when the learner refuses them as malformed.
        """
        num_accepted = 0
        all_messages = [trajectory_to_message(one) for one in trajectories]
        for messages in _split(all_messages, self._submit_bytes):
            request = work_pb2.SubmitRequest(
                worker_id=self._worker_id, lease_id=lease_id, trajectories=messages
            )
            response = await self._submit(request)
            num_accepted += sum(
                outcome != work_pb2.SUBMIT_OUTCOME_LEASE_ENDED for outcome in response.outcomes
            )
        return num_accepted

    async def report_failure(self, lease_id: str, failure: Failure) -> None:
        """Report that a lease failed, and why."""
        await self._submit(
            work_pb2.SubmitRequest(
                worker_id=self._worker_id,
                lease_id=lease_id,
                failure=failure_to_message(failure),
            )
        )

    async def release(self, lease_id: str, partial_responses: Sequence[PartialResponse]) -> None:
        """Release one lease with its partial responses; another worker resumes them.

        A message holds at most `MAX_PARTIAL_TOKENS` tokens; the longest responses are kept. If the
        learner refuses the call, the lease stays and expires.
        """
        kept = _longest(partial_responses, MAX_PARTIAL_TOKENS)
        request = work_pb2.ReleaseRequest(
            worker_id=self._worker_id,
            lease_ids=[lease_id],
            begun=[partial_to_message(one) for one in kept],
        )
        try:
            await self._retries.run(
                "Release", lambda: self._work.Release(request, timeout=CALL_TIMEOUT_S)
            )
        except SetAsideError:
            return  # its leases have ended
        except grpc.aio.AioRpcError as error:
            _LOGGER.warning("%s was not released and will expire: %s", lease_id, error.details())

    async def release_all(self) -> None:
        """Release every lease of this worker, without a retry: leases that stay will expire."""
        request = work_pb2.ReleaseRequest(worker_id=self._worker_id)
        try:
            await self._work.Release(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            _LOGGER.info("the leases were not released and will expire: %s", reason)

    async def newest_policy(
        self, held: HeldPolicy | None, *, wait_s: float
    ) -> policy_pb2.PolicyManifest:
        """Return the newest version's manifest, after up to `wait_s` if the worker holds it."""
        request = policy_pb2.GetManifestRequest(
            worker_id=self._worker_id,
            held_policy_version=held.policy_version if held else None,
            held_incarnation=held.incarnation if held else "",
            wait_seconds=wait_s,
        )
        manifest = await self._retries.run(
            "GetManifest",
            lambda: self._policy.GetManifest(request, timeout=CALL_TIMEOUT_S + wait_s),
            also={grpc.StatusCode.NOT_FOUND},
        )
        self.on_preempted(manifest.preempted_lease_ids)
        return manifest

    async def _submit(self, request: work_pb2.SubmitRequest) -> work_pb2.SubmitResponse:
        try:
            response = await self._retries.run(
                "Submit",
                lambda: self._work.Submit(request, timeout=CALL_TIMEOUT_S),
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise SubmissionRefusedError(error.details()) from error
            raise
        self.on_preempted(response.preempted_lease_ids)
        return response


def _longest(
    partial_responses: Sequence[PartialResponse], max_tokens: int
) -> list[PartialResponse]:
    """Return the longest responses that together hold at most `max_tokens` tokens."""
    kept = []
    for one in sorted(partial_responses, key=lambda one: len(one.token_ids), reverse=True):
        max_tokens -= len(one.token_ids)
        if max_tokens < 0:
            break
        kept.append(one)
    return kept


def _split(
    messages: Sequence[work_pb2.Trajectory], max_bytes: int
) -> list[list[work_pb2.Trajectory]]:
    """Split a group into submissions of at most `max_bytes`, or of one trajectory each."""
    parts: list[list[work_pb2.Trajectory]] = [[]]
    size_bytes = 0
    for message in messages:
        if parts[-1] and size_bytes + message.ByteSize() > max_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(message)
        size_bytes += message.ByteSize()
    return parts
