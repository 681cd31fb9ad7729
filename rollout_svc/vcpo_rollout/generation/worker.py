"""The worker: leases prompts, has them answered and judged, submits; and leaves in good order.

```
lease ---> prompt ---> engine (many sequences at a time) ---> reward ---> submit
  ^                                                                          |
  +---- as many prompts as there are free places <---------------------------+
```

Nobody waits for a worker: it may join late, fall silent or be killed; its leases expire, or are
handed back by itself or by whoever saw it die. What it cannot finish before it leaves, or before
the lease expires, it cuts and hands back with what was sampled, for another to go on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from vcpo.wire.failures import Failure, FailureCause, FailureCounts, one_line
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import PartialResponse
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import Engine, EngineError
from vcpo_rollout.environments.environment import Environment
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.deadlines import HAND_BACK_S, interrupt_after_s
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError, EnvironmentThreads
from vcpo_rollout.generation.group_sampling import GroupInterruptedError
from vcpo_rollout.generation.responses import ResponseGenerator
from vcpo_rollout.transport.learner_client import LearnerClient, SubmissionRefusedError
from vcpo_rollout.weights.receiver import WeightReceiver

_LOGGER = logging.getLogger(__name__)
_LEASE_WAIT_S = 5.0
_RECALL_WAIT_S = 20.0
_FIRST_FAILURE_PAUSE_S = 0.02
_LONGEST_FAILURE_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker works with."""

    learner: LearnerClient
    receiver: WeightReceiver
    engine: Engine
    environment: Environment
    codec: PromptCodec
    gauges: RolloutGauges
    max_concurrent_sequences: int
    sequences_per_prompt: int
    """Places that a training lease takes. The learner grants whole ones: asking with less room only
    waits."""
    environment_timeout_s: float | None = None
    """How long one call of the environment may take."""
    drain_s: float
    """How long answers under way may take to finish once the worker is to leave; then they are
    cut and handed back."""
    follows_preemption: bool = False
    """Whether the learner may recall leases: in runs that sample more than they need."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits so many seconds of the clock by which leases are cut."""


class Worker:
    """One rollout worker, from its first lease to its last submission."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._answers: dict[asyncio.Task[None], int] = {}
        """Places taken, by what takes them."""
        self._cuts: dict[str, asyncio.Event] = {}
        """By lease under way: set when it is to be handed back, whoever wants it."""
        self._recalled: frozenset[str] = frozenset()
        """Leases that the learner has recalled; it may say so before the lease itself arrives."""
        self._leaving = asyncio.Event()
        self._failures = FailureCounts()
        self._is_failing = False
        """Whether the last lease that ended could not be answered."""
        self._threads = EnvironmentThreads(
            parts.max_concurrent_sequences, timeout_s=parts.environment_timeout_s
        )
        self._answering = ResponseGenerator(
            engine=parts.engine,
            environment=parts.environment,
            codec=parts.codec,
            gauges=parts.gauges,
            threads=self._threads,
        )

    def shut_down(self) -> None:
        """Take no further lease; `run` returns when what is under way is finished or given up."""
        self._leaving.set()

    async def run(self) -> RunPhase:
        """Work until the run ends or `leave` is called; returns the run's phase as last heard.

        Raises:
            EngineError: when the engine refuses a version, or answers nothing any more.
            LearnerFailedError, grpc.aio.AioRpcError: as the calls to the learner.
        """
        receiving = asyncio.create_task(self._parts.receiver.run())
        leasing = asyncio.create_task(self._lease_until_done())
        leaving = asyncio.create_task(self._leaving.wait())
        recalling = asyncio.create_task(self._follow_recalls())
        needed = {receiving, recalling} if self._parts.follows_preemption else {receiving}
        try:
            await asyncio.wait({leasing, leaving, *needed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in needed:
                if ended.done():
                    ended.result()
            phase = leasing.result() if leasing.done() else RunPhase.RUNNING
            if phase is not RunPhase.COMPLETE:
                leasing.cancel()
                await self._finish_answers()
        finally:
            tasks = (receiving, leasing, leaving, recalling, *self._answers)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._threads.close()
            await self._parts.learner.release_all()
        return phase

    async def _lease_until_done(self) -> RunPhase:
        receiver = self._parts.receiver
        held = await receiver.wait_for_other(None)
        pause_s = 0.0
        while True:
            await self._wait_for_room()
            pause_s = _next_pause_s(pause_s) if self._is_failing else 0.0
            if pause_s:
                await self._parts.sleep(pause_s)
            held = receiver.held or held
            asked_s = time.monotonic()
            answer = await self._parts.learner.lease(
                held=held,
                max_trajectories=self._num_free,
                wait_s=_LEASE_WAIT_S,
                weight_updates_in_flight=receiver.updates_in_flight,
                held_lease_ids=self._cuts.keys(),
            )
            if answer.phase is not RunPhase.RUNNING:
                return answer.phase
            for lease in answer.leases:
                self._start(lease)
            if not answer.leases:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(answer.retry_after_s):
                        await receiver.wait_for_other(held)
            self._parts.gauges.add_lease_wait(time.monotonic() - asked_s)

    async def _follow_recalls(self) -> None:
        while self._parts.follows_preemption:
            learner = self._parts.learner
            self._recalled = await learner.preempted_leases(self._recalled, wait_s=_RECALL_WAIT_S)
            for lease_id in self._recalled & self._cuts.keys():
                self._cuts[lease_id].set()

    @property
    def _num_free(self) -> int:
        return self._parts.max_concurrent_sequences - sum(self._answers.values())

    async def _wait_for_room(self) -> None:
        while self._num_free < self._parts.sequences_per_prompt:
            await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
        self._answering.require_engine()

    def _start(self, lease: work_pb2.Lease) -> None:
        interrupt = self._cuts[lease.lease_id] = asyncio.Event()
        if lease.lease_id in self._recalled:
            interrupt.set()
        task = asyncio.create_task(self._answer_in_time(lease, interrupt))
        self._answers[task] = lease.num_trajectories
        task.add_done_callback(lambda _: self._cuts.pop(lease.lease_id))
        task.add_done_callback(self._answered)
        self._parts.gauges.set_in_flight(sum(self._answers.values()))

    def _answered(self, task: asyncio.Task[None]) -> None:
        del self._answers[task]
        self._parts.gauges.set_in_flight(sum(self._answers.values()))
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.error("a lease could not be answered or reported", exc_info=error)

    async def _finish_answers(self) -> None:
        """Wait for the answers under way; those that take too long are cut and handed back."""
        if self._answers:
            await asyncio.wait(self._answers, timeout=self._parts.drain_s)
        for interrupt in self._cuts.values():
            interrupt.set()
        if self._answers:
            await asyncio.wait(self._answers, timeout=HAND_BACK_S)

    async def _answer_in_time(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> None:
        cutting = asyncio.create_task(self._cut_in_time(lease, interrupt))
        try:
            await self._answer(lease, interrupt)
        finally:
            cutting.cancel()

    async def _cut_in_time(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> None:
        # What nobody can go on with has all of its time to become complete.
        if lease.timeout_seconds and _can_be_resumed(lease):
            await self._parts.sleep(interrupt_after_s(lease.timeout_seconds))
            interrupt.set()

    async def _answer(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> None:
        try:
            # An answer that outlives its lease is wanted by nobody; an engine that does not heed
            # the cut must not hold its places for ever.
            async with asyncio.timeout(lease.timeout_seconds or None):
                trajectories = await self._answering.answers(lease, interrupt)
                taken = await self._parts.learner.submit(lease.lease_id, trajectories)
        except EngineError as error:
            failure = Failure(cause=FailureCause.ENGINE, message=one_line(str(error)))
            await self._report(lease, failure, error)
        except SubmissionRefusedError as error:
            failure = Failure(cause=FailureCause.REFUSED, message=one_line(str(error)))
            await self._report(lease, failure, error)
        except EnvironmentFailedError as error:
            await self._report(lease, error.failure, error)
        except GroupInterruptedError as error:
            await self._hand_back(lease, error.partial_responses)
        except TimeoutError:
            _LOGGER.warning("%s expired before it was answered", lease.lease_id)
            self._parts.gauges.count_expired(lease.num_trajectories)
        else:
            self._is_failing = False
            self._parts.gauges.count_submitted(trajectories, taken)

    async def _report(self, lease: work_pb2.Lease, failure: Failure, error: Exception) -> None:
        """Tell the learner of a failure, and the log if it is a new one or one of very many."""
        self._is_failing = True
        if (line := self._failures.add(failure)) is not None:
            is_first = line == failure.sentence
            _LOGGER.error(
                "prompt %d was not answered: %s",
                lease.prompt_index,
                line,
                exc_info=(error.__cause__ or error) if is_first else None,
            )
        self._parts.gauges.count_failed(lease.num_trajectories, failure.cause)
        await self._parts.learner.report_failure(lease.lease_id, failure)

    async def _hand_back(
        self, lease: work_pb2.Lease, partial_responses: Sequence[PartialResponse]
    ) -> None:
        kept = partial_responses if _can_be_resumed(lease) else ()
        await self._parts.learner.release(lease.lease_id, kept)
        self._parts.gauges.count_released(lease.num_trajectories, kept)


def _next_pause_s(pause_s: float) -> float:
    """Pause before the next lease while leases fail: whatever broke may need time, or a person."""
    return min(max(2 * pause_s, _FIRST_FAILURE_PAUSE_S), _LONGEST_FAILURE_PAUSE_S)


def _can_be_resumed(lease: work_pb2.Lease) -> bool:
    """Whether answers that are cut can be gone on with; an evaluation's are of one version each."""
    return lease.split == work_pb2.SPLIT_TRAIN
