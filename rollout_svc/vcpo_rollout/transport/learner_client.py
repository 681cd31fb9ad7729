"""The client of the learner: typed calls with deadlines, which are retried where that can help.

```
transient   unreachable, busy or late   retried without end: a worker outlives a learner's restart
doubtful    a fault on the way          `MAX_DOUBTFUL_FAILURES` in a row end the call
final       the learner refuses         not retried
set aside   the learner refuses the     not retried; the worker exits
            worker, whatever it asks
```
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import grpc

from vcpo.records.reasons import NO_UPDATES, WeightUpdates
from vcpo.service.lifecycle import peak_memory_bytes
from vcpo.wire.client import is_doubtful, is_transient
from vcpo.wire.errors import SetAsideError, set_aside_error
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

_LOGGER = logging.getLogger(__name__)
_Response = TypeVar("_Response")

FIRST_PAUSE_S: Final = 0.2
"""Longest pause after the first failure of a call; it doubles with every further failure."""
LONGEST_PAUSE_S: Final = 5.0
MAX_DOUBTFUL_FAILURES: Final = 10
"""A call ends after this many doubtful failures in a row, which take 20 to 30 s."""


class LearnerFailedError(RuntimeError):
    """The learner or the network keeps failing; the message holds the last error."""


class Retries:
    """Retries calls. Logs one line when calls begin to fail and one when they succeed again.

    pause: Waits for a number of seconds.
    """

    def __init__(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._pause = pause
        self._num_failures = 0
        """Failures of all calls since one last succeeded."""

    async def run(
        self,
        name: str,
        call: Callable[[], Awaitable[_Response]],
        *,
        also: Collection[grpc.StatusCode] = (),
    ) -> _Response:
        """Make a call, and retry it after transient failures and those with a code in `also`.

        Raises:
            LearnerFailedError: after `MAX_DOUBTFUL_FAILURES` doubtful failures in a row.
            SetAsideError: if the learner has taken this worker out of the run.
            grpc.aio.AioRpcError: for a final failure.
        """
        longest_pause_s = FIRST_PAUSE_S
        num_doubtful = 0
        while True:
            try:
                response = await call()
            except grpc.aio.AioRpcError as error:
                if is_doubtful(error):
                    num_doubtful += 1
                elif is_transient(error) or error.code() in also:
                    num_doubtful = 0
                elif (set_aside := set_aside_error(error)) is not None:
                    raise set_aside from error
                else:
                    raise
                reason = f"{error.code().name}: {error.details()}"
                if num_doubtful == MAX_DOUBTFUL_FAILURES:
                    raise LearnerFailedError(
                        f"{name} failed {num_doubtful} times in a row, at last with {reason}; "
                        "look for the cause in the learner's log, or between worker and learner"
                    ) from error
            else:
                if self._num_failures:
                    _LOGGER.info("%s succeeded after %d failed calls", name, self._num_failures)
                    self._num_failures = 0
                return response
            level = logging.DEBUG if self._num_failures else logging.WARNING
            _LOGGER.log(level, "%s failed with %s; it is retried until it succeeds", name, reason)
            self._num_failures += 1
            # Jitter spreads the requests of many workers after a restart of the learner.
            pause_s = longest_pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            await self._pause(pause_s)
            longest_pause_s = min(2 * longest_pause_s, LONGEST_PAUSE_S)


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
    """Calls to the learner, retried as this module describes.

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
