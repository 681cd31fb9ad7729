"""The engine that runs on any machine: `transformers` in one thread of the worker's process.

The thread owns the model and its state; coroutines send it commands and await futures. It serves
until `close`, or until its thread fails. Then every open future fails with EngineError, and so does
every later call: no caller waits for an ended thread.
"""

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from vcpo.api.workloads import Precision
from vcpo.metrics.device_memory import device_memory
from vcpo.service.lifecycle import StartError, gpu_memory_ratio, keep_freed_memory
from vcpo_rollout.engines.engine import (
    EngineError,
    EngineSetting,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.hf.routes import RouteRecorder
from vcpo_rollout.engines.limits import RequestLimits
from vcpo_rollout.engines.loading import load_model_skeleton, place_model, torch_dtype
from vcpo_rollout.engines.loading_weights import StagedWeights, stage_weights
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.gauges import RolloutGauges

logger = logging.getLogger(__name__)

# With 64 slots and responses of 1 to 128 tokens, this yields about a third more tokens per second
# than a join in every step.
_JOIN_EVERY_STEPS = 8
_JOIN_FREE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Generate:
    sequence: PartialSequence
    interrupt: asyncio.Event | None
    future: Future[Generation] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Swap:
    policy_version: int
    weights: StagedWeights
    future: Future[int] = field(default_factory=Future)


class HfEngine:
    """Samples with a `transformers` model; an `Engine`.

    Requests beyond `max_concurrent_sequences` wait for a slot, first come first served. A cancelled
    `generate` frees its slot before the next step.

    model: a decoder whose only state are keys and values, which the first swap checks. The engine
        moves it to `device`, casts its parameters to `precision`, and owns it from then on.
    pad_token_id: any token of the vocabulary; padding is masked.
    stop_strings: that end a response; None if only end tokens do.
    returns_routes: whether responses carry the experts that computed their tokens.
    max_model_len: longest prompt and response together, in tokens; None for the model's context.
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
        stop_strings: StopStrings | None = None,
        returns_routes: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        place_model(model, torch.device(device), torch_dtype(precision))
        self._model = model
        self._limits = RequestLimits.of(model, max_model_len)
        self.end_token_ids = end_token_ids
        self.stop_strings = stop_strings
        self._num_slots = max_concurrent_sequences
        self._batch = DecodeBatch(
            model,
            end_token_ids=end_token_ids,
            pad_token_id=pad_token_id,
            seed=seed,
            stop_strings=stop_strings,
            routes=RouteRecorder(model) if returns_routes else None,
        )
        # Used only by the thread:
        self._waiting: deque[_Generate] = deque()
        self._running: dict[PartialSequence, _Generate] = {}
        self._steps_since_join = 0
        # Shared; `_gate` guards the two fields below it, and the queue is thread-safe:
        self._commands: SimpleQueue[_Generate | _Swap | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._ended: str | None = None
        self._swap_order = asyncio.Lock()
        self._gauges: RolloutGauges | None = None
        self._thread = threading.Thread(target=self._serve, name="hf-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, *, setting: EngineSetting) -> Self:
        spec, group = setting.spec, setting.group
        if group.threads is not None:
            torch.set_num_threads(group.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and (ratio := gpu_memory_ratio()) is not None:
            torch.cuda.set_per_process_memory_fraction(ratio)
        if device == "cpu":
            keep_freed_memory()
        pad_token_id = setting.tokenizer.pad_token_id
        return cls(
            load_model_skeleton(
                spec.model.name,
                revision=spec.model.revision,
                trust_remote_code=spec.model.trust_remote_code,
                precision=group.number_format,
                context_tokens=spec.context_tokens,
            ),
            end_token_ids=setting.end_token_ids,
            pad_token_id=(
                pad_token_id if isinstance(pad_token_id, int) else min(setting.end_token_ids)
            ),
            max_concurrent_sequences=group.max_concurrent_sequences,
            seed=setting.seed,
            device=device,
            precision=group.number_format,
            stop_strings=setting.stop_strings,
            returns_routes=spec.algorithm.router_replay,
            max_model_len=group.max_model_len,
        )

    @property
    def context_tokens(self) -> int | None:
        return self._limits.context_tokens

    @property
    def policy_version(self) -> int | None:
        return self._batch.policy_version

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        self._limits.check(request)
        command = _Generate(sequence=PartialSequence(request=request), interrupt=interrupt)
        self._submit(command)
        return await asyncio.wrap_future(command.future)

    def export_to(self, gauges: RolloutGauges) -> None:
        self._gauges = gauges

    async def swap_weights(self, weights: PolicyWeights) -> int:
        async with self._swap_order:
            # The lock keeps other swaps out: the version in use stays until this swap.
            command = await asyncio.to_thread(self._stage, weights)
            self._submit(command)
            num_running = await asyncio.wrap_future(command.future)
        memory = device_memory(torch.cuda, self._model.device)
        if self._gauges is not None and memory is not None:
            self._gauges.set_device_memory(memory)
        return num_running

    def _stage(self, weights: PolicyWeights) -> _Swap:
        return _Swap(
            policy_version=weights.policy_version,
            weights=stage_weights(self._model, weights, in_use=self.policy_version),
        )

    async def close(self) -> None:
        self._end("the engine is closed")
        self._commands.put(None)  # ends the thread
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
        """Fail open futures and refuse later calls; the first reason stays."""
        with self._gate:
            self._ended = self._ended or reason
            reason = self._ended
            open_futures = list(self._open)
        for future in open_futures:
            _resolve(future, EngineError(reason))

    def _serve(self) -> None:
        """Run the thread."""
        reason = "the decoding thread ended"
        try:
            while self._take_commands():
                self._drop_stopped()
                self._admit_waiting()
                self._step()
        except Exception as error:  # the callers must learn why the thread ended
            logger.exception("the decoding thread failed; the engine has ended")
            reason = f"the decoding thread failed: {type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _take_commands(self) -> bool:
        """Take all waiting commands; wait for one if idle. Return False to stop the thread."""
        idle = not self._running and (not self._waiting or self.policy_version is None)
        try:
            while True:
                command = self._commands.get(block=idle)
                idle = False
                match command:
                    case _Generate():
                        self._waiting.append(command)
                    case _Swap() if not command.future.done():
                        outcome: int | StartError = len(self._batch.sequences)
                        try:
                            self._batch.swap(command.policy_version, command.weights)
                        except StartError as error:  # no version of this model ever will be in use
                            outcome = error
                        _resolve(command.future, outcome)
                    case None:
                        return False
        except Empty:
            return True

    def _drop_stopped(self) -> None:
        """Drop what was interrupted or cancelled: its slot is free before the next step."""
        for command in (*self._waiting, *self._running.values()):
            if command.interrupt is not None and command.interrupt.is_set():
                tokens = command.sequence.to_partial_response()
                _resolve(command.future, GenerationInterruptedError(tokens))
        stopped = [each for each, command in self._running.items() if command.future.done()]
        self._batch.drop(stopped)
        for sequence in stopped:
            del self._running[sequence]

    def _admit_waiting(self) -> None:
        self._steps_since_join += 1
        num_free = self._num_slots - len(self._running)
        if self.policy_version is None or not worth_joining(
            num_free=num_free,
            num_slots=self._num_slots,
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


def worth_joining(*, num_free: int, num_slots: int, steps_since_join: int) -> bool:
    """Whether waiting sequences should join now rather than later with more of them.

    A join costs a forward pass of any size. Where sequences are short, some end in every step, and
    a join waits until an eighth of the slots is free. Where they are long, few end, and a join
    waits eight steps at most, so that no slot stays empty for long.
    """
    return (
        num_free >= num_slots * _JOIN_FREE_SHARE or steps_since_join >= _JOIN_EVERY_STEPS
    ) and num_free > 0


def _resolve(future: Future[Any], outcome: object) -> None:
    """Set a future's outcome; a future that was cancelled or failed already does not change."""
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return
