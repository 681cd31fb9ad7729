"""The engine that runs on any machine: `transformers` in one thread of the worker's process.

The thread owns the model and everything about it; coroutines hand it commands and await futures.

    generate, interrupt,  --commands-->  thread: take commands, admit, step, resolve futures
    swap_weights, close   <--futures---

Lifecycle: it serves until `close`, or until the thread fails. Either way every future still open
fails with EngineError, and so does every later call: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import PreTrainedModel

from vcpo.spec.workloads import Precision
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.limits import RequestLimits, check_decodable
from vcpo_rollout.engines.loading import place_model, torch_dtype
from vcpo_rollout.engines.loading_weights import StagedWeights, stage_weights

logger = logging.getLogger(__name__)

# With 64 places and answers of 1 to 128 tokens, this serves about a third more tokens than joining
# in every step does (`benchmarks.generation`).
_JOIN_EVERY_STEPS = 8
_JOIN_FREE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Generate:
    sequence: PartialSequence
    future: Future[Generation] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    generate: _Generate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Swap:
    policy_version: int
    weights: StagedWeights
    future: Future[int] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Close:
    """Ends the thread."""


class HfEngine:
    """Samples with a `transformers` model; an `Engine`.

    Requests beyond `max_concurrent_sequences` wait for a place, first come first served. Cancelling
    a `generate` frees its place before the next step.

    model: an attention decoder. The engine moves it to `device`, casts its parameters to
        `precision`, and owns it from then on.
    pad_token_id: any token of the vocabulary; padding is masked.

    Raises:
        ValueError: when the model is no attention decoder, or there is not even one place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: frozenset[int],
        pad_token_id: int,
        max_concurrent_sequences: int,
        seed: int,
        device: torch.device | str = "cpu",
        precision: Precision = Precision.FLOAT32,
    ) -> None:
        if max_concurrent_sequences < 1:
            raise ValueError(f"max_concurrent_sequences: {max_concurrent_sequences} is below 1")
        check_decodable(model)
        place_model(model, torch.device(device), torch_dtype(precision))
        self._model = model
        self._limits = RequestLimits.of(model)
        self._end_token_ids = end_token_ids
        self._num_places = max_concurrent_sequences
        self._batch = DecodeBatch(
            model, end_token_ids=end_token_ids, pad_token_id=pad_token_id, seed=seed
        )
        # Touched by the thread alone:
        self._waiting: deque[_Generate] = deque()
        self._running: dict[PartialSequence, _Generate] = {}
        self._steps_since_join = 0
        # Shared; `_gate` guards the two below it, the queue guards itself:
        self._commands: SimpleQueue[_Generate | _Cut | _Swap | _Close] = SimpleQueue()
        self._gate = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._ended: str | None = None
        self._swap_order = asyncio.Lock()
        self._thread = threading.Thread(target=self._serve, name="hf-engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int | None:
        """Version in use; None before the first swap."""
        return self._batch.policy_version

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_token_ids

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence; waits for the first policy and for a free place.

        Raises:
            GenerationInterruptedError: with what was sampled, when it was cut.
            EngineError: when the request cannot be served, generation failed, or the engine ended.
        """
        self._limits.check(request)
        command = _Generate(sequence=PartialSequence(request=request))
        self._submit(command)
        cutting = (
            None if interrupt is None else asyncio.create_task(self._cut_when(interrupt, command))
        )
        try:
            return await asyncio.wrap_future(command.future)
        finally:
            if cutting is not None:
                cutting.cancel()

    async def _cut_when(self, interrupt: asyncio.Event, command: _Generate) -> None:
        await interrupt.wait()
        self._commands.put(_Cut(command))

    async def swap_weights(self, weights: PolicyWeights) -> int:
        """Use `weights` from the next decoding step on; returns when they are in use.

        They are read and checked outside the decoding thread, which meanwhile goes on. Concurrent
        swaps take effect in the order of the calls.

        Returns: how many sequences under way go on with them.

        Raises:
            EngineError: when the tensors do not fit the model; the old weights stay in use.
        """
        async with self._swap_order:
            # No other swap is under way: what is in use now is so when this one takes its turn.
            staged = await asyncio.to_thread(
                stage_weights, self._model, weights, in_use=self.policy_version
            )
            command = _Swap(policy_version=weights.policy_version, weights=staged)
            self._submit(command)
            return await asyncio.wrap_future(command.future)

    async def close(self) -> None:
        """Stop after the step under way; all that is open fails with EngineError."""
        self._end("the engine is closed")
        self._commands.put(_Close())
        await asyncio.to_thread(self._thread.join)

    def _submit(self, command: _Generate | _Swap) -> None:
        with self._gate:
            if self._ended is not None:
                raise EngineError(self._ended)
            self._open.add(command.future)
        command.future.add_done_callback(self._forget)
        self._commands.put(command)

    def _forget(self, future: Future[Any]) -> None:
        with self._gate:
            self._open.discard(future)

    def _end(self, reason: str) -> None:
        """Refuse what comes, fail what is open; the first reason stays."""
        with self._gate:
            self._ended = self._ended or reason
            reason = self._ended
            abandoned = list(self._open)
        for future in abandoned:
            _resolve(future, EngineError(reason))

    def _serve(self) -> None:
        """Body of the thread."""
        reason = "the decoding thread ended"
        try:
            while self._take_commands():
                self._drop_cancelled()
                self._admit_waiting()
                self._step()
        except Exception as error:  # whatever ends the thread must reach those who wait for it
            logger.exception("The decoding thread failed; the engine is dead")
            reason = f"the decoding thread failed: {type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _take_commands(self) -> bool:
        """Take what has been handed over, waiting for it when idle; False means stop."""
        idle = not self._running and (not self._waiting or self.policy_version is None)
        try:
            while True:
                command = self._commands.get(block=idle)
                idle = False
                match command:
                    case _Generate():
                        self._waiting.append(command)
                    case _Cut():
                        # As after a cancellation, its place is free before the next step.
                        partial = command.generate.sequence.partial()
                        _resolve(command.generate.future, GenerationInterruptedError(partial))
                    case _Swap() if not command.future.done():
                        self._batch.swap(command.policy_version, command.weights)
                        _resolve(command.future, len(self._batch.sequences))
                    case _Close():
                        return False
        except Empty:
            return True

    def _drop_cancelled(self) -> None:
        gone = [sequence for sequence, command in self._running.items() if command.future.done()]
        self._batch.drop(gone)
        for sequence in gone:
            del self._running[sequence]

    def _admit_waiting(self) -> None:
        self._steps_since_join += 1
        num_free = self._num_places - len(self._running)
        if self.policy_version is None or not worth_joining(
            num_free=num_free,
            num_places=self._num_places,
            steps_since_join=self._steps_since_join,
        ):
            return
        joining: list[_Generate] = []
        while self._waiting and len(joining) < num_free:
            command = self._waiting.popleft()
            if not command.future.done():
                joining.append(command)
        if joining:
            self._steps_since_join = 0
            self._batch.admit([command.sequence for command in joining])
            self._running |= {command.sequence: command for command in joining}

    def _step(self) -> None:
        for sequence, outcome in self._batch.step().items():
            _resolve(self._running.pop(sequence).future, outcome)


def worth_joining(*, num_free: int, num_places: int, steps_since_join: int) -> bool:
    """Whether waiting sequences should join now rather than together with more of them.

    A join costs a forward pass, whatever its size. Short sequences end in every step; they join
    when an eighth of the places is free. Long ones end rarely; they join after eight steps at most,
    so that no place stays empty for long.
    """
    return (
        num_free >= num_places * _JOIN_FREE_SHARE or steps_since_join >= _JOIN_EVERY_STEPS
    ) and num_free > 0


def _resolve(future: Future[Any], outcome: object) -> None:
    """Settle a future once; one that was cancelled or failed meanwhile stays as it is."""
    try:
        if isinstance(outcome, EngineError | GenerationInterruptedError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return
