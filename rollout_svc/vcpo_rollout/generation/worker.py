"""The worker: leases prompts, generates and judges responses, submits them, and shuts down.

No other process waits for a worker. It may join late, stop responding or be killed: its leases
expire, or who saw it die releases them. Before a shutdown, and before a lease expires, the worker
interrupts what it cannot finish and releases the lease with the tokens sampled so far.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from vcpo.service.logs import log_fields
from vcpo.wire.errors import SetAsideError
from vcpo.wire.failures import Failure, FailureCause, FailureCounts, one_line
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.engine import EngineError, PromptTooLongError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError
from vcpo_rollout.generation.group_sampling import GroupInterruptedError
from vcpo_rollout.generation.responses import ResponseGenerator
from vcpo_rollout.transport.learner_client import LearnerClient, SubmissionRefusedError
from vcpo_rollout.weights.receiver import WeightReceiver

_LOGGER = logging.getLogger(__name__)
_CAUSES = {
    PromptTooLongError: FailureCause.TOO_LONG,  # an EngineError as well
    EngineError: FailureCause.ENGINE,
    SubmissionRefusedError: FailureCause.REFUSED,
}
_LEASE_WAIT_S = 5.0
_FIRST_FAILURE_PAUSE_S = 0.02
_LONGEST_FAILURE_PAUSE_S = 5.0
_RELEASE_S = 10.0
"""Time to interrupt and release all leases; a pod has 30 s after its drain."""
_RELEASE_SHARE = 0.1
"""The same as a share of a short lease, so that most of its time is left to generate."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rollout worker, from its first lease to its last submission. Owner: its event loop."""

    learner: LearnerClient
    receiver: WeightReceiver
    responses: ResponseGenerator
    gauges: RolloutGauges
    max_concurrent_sequences: int
    sequences_per_prompt: int
    """Slots that a training lease takes. The learner grants whole leases, so a request with fewer
    free slots would only wait."""
    drain_s: float
    """How long running leases may take to finish after a shutdown is requested; then the worker
    interrupts and releases them."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits for a number of seconds, on the clock by which leases are interrupted."""
    _slots: dict[asyncio.Task[None], int] = field(default_factory=dict, init=False)
    """Slots that each running lease takes, by its task."""
    _interrupts: dict[str, asyncio.Event] = field(default_factory=dict, init=False)
    """Events of the running leases, set once a lease must be interrupted and released."""
    _shutdown: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failures: FailureCounts = field(default_factory=FailureCounts, init=False)
    _is_failing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.learner.on_preempted = self._interrupt

    def shut_down(self) -> None:
        self._shutdown.set()

    async def run(self) -> RunPhase:
        """Work until the run ends or `shut_down` is called; return the run's last known phase.

        Raises:
            EngineError: when the engine refuses a version, or fails for too many leases in a row.
            HungCallsError: when too many calls of the environment hang in this process.
            LearnerFailedError, SetAsideError, grpc.aio.AioRpcError: as the calls of
                `LearnerClient`.
        """
        receiving = asyncio.create_task(self.receiver.run())
        leasing = asyncio.create_task(self._lease_until_done())
        stopping = asyncio.create_task(self._shutdown.wait())
        try:
            await asyncio.wait({leasing, stopping, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            phase = leasing.result() if leasing.done() else RunPhase.RUNNING
            if phase is not RunPhase.COMPLETE:
                leasing.cancel()
                await self._drain()
        finally:
            tasks = (receiving, leasing, stopping, *self._slots)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.responses.threads.close()
            await self.learner.release_all()
        return phase

    async def _lease_until_done(self) -> RunPhase:
        receiver = self.receiver
        held = await receiver.wait_for_other(None)
        pause_s = 0.0
        while True:
            while self._num_free < self.sequences_per_prompt:
                await asyncio.wait(self._slots, return_when=asyncio.FIRST_COMPLETED)
            self.responses.check_engine()
            self.responses.threads.check()
            if self._is_failing:
                # The cause may need time or a person: pauses grow while leases fail.
                pause_s = min(max(2 * pause_s, _FIRST_FAILURE_PAUSE_S), _LONGEST_FAILURE_PAUSE_S)
                await self.sleep(pause_s)
            else:
                pause_s = 0.0
            held = receiver.held or held
            asked_s = time.monotonic()
            result = await self.learner.lease(
                held=held,
                max_trajectories=self._num_free,
                wait_s=_LEASE_WAIT_S,
                weight_updates=receiver.weight_updates,
                held_lease_ids=self._interrupts.keys(),
            )
            if result.phase is not RunPhase.RUNNING:
                return result.phase
            for lease in result.leases:
                self.gauges.hear_of_version(lease.granted_policy_version)
                self._start(lease)
            if not result.leases:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(result.retry_after_s):
                        await receiver.wait_for_other(held)
            self.gauges.metrics.lease_wait_s.inc(time.monotonic() - asked_s)

    def _interrupt(self, lease_ids: Collection[str]) -> None:
        for lease_id in lease_ids:
            if lease_id in self._interrupts:
                self._interrupts[lease_id].set()

    @property
    def _num_free(self) -> int:
        return self.max_concurrent_sequences - sum(self._slots.values())

    def _start(self, lease: work_pb2.Lease) -> None:
        interrupt = self._interrupts[lease.lease_id] = asyncio.Event()
        with log_fields(lease=lease.lease_id):
            task = asyncio.create_task(self._complete(lease, interrupt))
            task.add_done_callback(lambda task: self._end(task, lease.lease_id))
        self._slots[task] = lease.num_trajectories
        self.gauges.metrics.in_flight.set(sum(self._slots.values()))

    def _end(self, task: asyncio.Task[None], lease_id: str) -> None:
        del self._interrupts[lease_id]
        del self._slots[task]
        self.gauges.metrics.in_flight.set(sum(self._slots.values()))
        error = None if task.cancelled() else task.exception()
        # A worker that was set aside hears so at its next request for work, and ends.
        if error is not None and not isinstance(error, SetAsideError):
            _LOGGER.error(
                "%s: the worker could neither finish nor report it", lease_id, exc_info=error
            )

    async def _drain(self) -> None:
        """Wait up to `drain_s` for running leases; interrupt and release those that remain."""
        if self._slots:
            await asyncio.wait(self._slots, timeout=self.drain_s)
        for interrupt in self._interrupts.values():
            interrupt.set()
        if self._slots:
            await asyncio.wait(self._slots, timeout=_RELEASE_S)

    async def _interrupt_in_time(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> None:
        # A lease that cannot be resumed has all of its time to become complete.
        if lease.timeout_seconds and _is_resumable(lease):
            # The rest covers the decoding step, the release, and the lease's way to the worker.
            rest_s = min(_RELEASE_S, _RELEASE_SHARE * lease.timeout_seconds)
            await self.sleep(lease.timeout_seconds - rest_s)
            interrupt.set()

    async def _complete(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> None:
        """Generate, judge and submit a lease; report its failure, or release it."""
        learner, gauges = self.learner, self.gauges
        timer = asyncio.create_task(self._interrupt_in_time(lease, interrupt))
        try:
            # Responses of an expired lease are useless; an engine that ignores the interrupt must
            # not hold the slots for ever.
            async with asyncio.timeout(lease.timeout_seconds or None):
                trajectories = await self.responses.generate(lease, interrupt)
                num_accepted = await learner.submit(lease.lease_id, trajectories)
        except (EngineError, SubmissionRefusedError) as error:
            cause = next(_CAUSES[kind] for kind in _CAUSES if isinstance(error, kind))
            await self._report(lease, Failure(cause=cause, message=one_line(str(error))), error)
        except EnvironmentFailedError as error:
            await self._report(lease, error.failure, error)
        except GroupInterruptedError as error:
            released = error.partial_responses if _is_resumable(lease) else ()
            await learner.release(lease.lease_id, released)
            gauges.metrics.samples.labels("released").inc(lease.num_trajectories)
        except TimeoutError:
            _LOGGER.warning("%s expired before its responses were submitted", lease.lease_id)
            gauges.metrics.samples.labels("lease_ended").inc(lease.num_trajectories)
        else:
            self._is_failing = False
            gauges.count_submitted(trajectories, num_accepted)
        finally:
            timer.cancel()

    async def _report(self, lease: work_pb2.Lease, failure: Failure, error: Exception) -> None:
        """Report a failure to the learner; log it if it is new, and now and then if it repeats."""
        # The next prompt may fit, and is tried without a pause.
        self._is_failing = failure.cause is not FailureCause.TOO_LONG
        if (line := self._failures.add(failure)) is not None:
            is_first = line == failure.sentence
            _LOGGER.error(
                "prompt %d failed: %s",
                lease.prompt_index,
                line,
                exc_info=(error.__cause__ or error) if is_first else None,
            )
        self.gauges.count_failed(lease.num_trajectories, failure.cause)
        await self.learner.report_failure(lease.lease_id, failure)


def _is_resumable(lease: work_pb2.Lease) -> bool:
    return lease.split == work_pb2.SPLIT_TRAIN
