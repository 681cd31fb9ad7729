"""The engine for throughput: vLLM in its own processes, used through its public interface.

    generate      --> AsyncLLM --> scheduler, model        (vLLM does the continuous batching)
    swap_weights  --> pause, keeping sequences --> load (`loaders`) --> label --> resume

A pause falls between two decoding steps. docs/inside/operator-and-workers.md says what becomes of
keys and values. The engine serves until `close`, until vLLM's processes end, or until a swap fails
half-way and the weights are unknown. Then every open call raises EngineError, and so does every
later one. vLLM's processes end with this process, however it ends (`vllm.worker`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from transformers import PreTrainedModel
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vcpo.api.workloads import KvCache, Lora
from vcpo.metrics.label_values import MemoryState
from vcpo.service.vocabulary import vocabulary_of
from vcpo_rollout.engines.engine import (
    EngineError,
    EngineSetting,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.engines.limits import RequestLimits
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.vllm.exchange import sampling_params, to_generation
from vcpo_rollout.engines.vllm.last_error import LastError
from vcpo_rollout.engines.vllm.loaders import AdapterLoader, ParameterLoader
from vcpo_rollout.engines.vllm.start import (
    VllmSettings,
    for_model,
    load_skeleton,
    start_llm,
)
from vcpo_rollout.gauges import RolloutGauges

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
SWAP_TIMEOUT_S = 300.0
_WATCH_S = 0.5
_DIED = "vLLM's engine process has died"
_ABORT_TIMEOUT_S = 5.0
_ABORT_AGAIN_S = 0.05
_SHUTDOWN_S = 5.0
"""How long vLLM's processes may take to end before they are killed."""


class VllmEngine:
    """Samples with vLLM; an `Engine`.

    Requests beyond `max_num_seqs` wait in vLLM's queue, first come first served. A cancelled
    `generate` frees its slot.

    llm: has no running sequences; the engine owns it from then on.
    skeleton: the model in `transformers`, against which weights are checked.
    stop_strings: that end a response; None if only end tokens do.
    lora: of the adapters that versions consist of; None for versions of all parameters.
    kv_cache: what becomes of keys and values when a version comes.
    last_error: that of vLLM's processes; None if they were started without.
    swap_timeout_s: limit of a whole swap; a longer one is stuck, and the engine ends.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        skeleton: PreTrainedModel,
        end_token_ids: frozenset[int],
        stop_strings: StopStrings | None = None,
        lora: Lora | None = None,
        kv_cache: KvCache = KvCache.RECOMPUTE,
        last_error: LastError | None = None,
        swap_timeout_s: float = SWAP_TIMEOUT_S,
    ) -> None:
        self._swap_timeout_s = swap_timeout_s
        self._last_error = last_error
        self._llm = llm
        self._loader: ParameterLoader | AdapterLoader = (
            ParameterLoader(skeleton) if lora is None else AdapterLoader(skeleton, lora)
        )
        self.end_token_ids = end_token_ids
        self.stop_strings = stop_strings
        self._vocabulary = vocabulary_of(skeleton)
        self._limits = RequestLimits(
            vocabulary_size=RequestLimits.of(skeleton).vocabulary_size,
            context_tokens=llm.model_config.max_model_len,
        )
        self.context_tokens = self._limits.context_tokens
        self._numbers = itertools.count()
        self.policy_version: int | None = None
        self._keeps_keys = kv_cache is KvCache.KEEP
        self._gauges: RolloutGauges | None = None
        self._keys_version: int | None = None
        """Oldest version of keys and values that a request may read that comes now."""
        self._ready = asyncio.Event()
        self._swap_order = asyncio.Lock()
        self._open: set[asyncio.Task[Any]] = set()
        self._ended: str | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, *, setting: EngineSetting, **arguments: Any) -> Self:
        return cls.start(
            VllmSettings.of(setting, arguments),
            end_token_ids=setting.end_token_ids,
            stop_strings=setting.stop_strings,
        )

    @classmethod
    def start(
        cls,
        settings: VllmSettings,
        *,
        end_token_ids: frozenset[int],
        stop_strings: StopStrings | None = None,
    ) -> Self:
        """Start vLLM's processes. This takes seconds to minutes, so call it in a thread."""
        skeleton = load_skeleton(settings)
        last_error = LastError()
        return cls(
            start_llm(for_model(settings, skeleton), last_error),
            skeleton=skeleton,
            end_token_ids=end_token_ids,
            stop_strings=stop_strings,
            lora=settings.lora,
            kv_cache=settings.group.kv_cache,
            last_error=last_error,
        )

    def export_to(self, gauges: RolloutGauges) -> None:
        self._gauges = gauges

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        self._limits.check(request)
        return await self._run_until_ended(self._sample(request, interrupt))

    async def swap_weights(self, weights: PolicyWeights) -> int:
        return await asyncio.shield(self._run_until_ended(self._swap(weights)))

    async def close(self) -> None:
        self._end("the engine is closed")
        if self._open:
            await asyncio.wait(self._open, timeout=_ABORT_TIMEOUT_S)
        if self._watching is not None:
            self._watching.cancel()
        if self._llm.output_handler is not None:
            # It would report the end of the processes as a failure.
            self._llm.output_handler.cancel()
        await asyncio.to_thread(self._llm.shutdown, timeout=_SHUTDOWN_S)

    async def _run_until_ended(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of `work`, unless the engine ends first."""
        self._watching = self._watching or asyncio.create_task(self._watch())
        task = asyncio.create_task(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        if self._ended is not None:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._ended is None or (caller is not None and caller.cancelling()):
                raise
            raise EngineError(self._ended) from None
        except EngineDeadError as error:
            self._end_by_death()
            raise EngineError(self._ended) from error

    async def _watch(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(_WATCH_S)
        self._end_by_death()

    def _end_by_death(self) -> None:
        cause = "" if self._last_error is None else self._last_error.read()
        self._end(f"{_DIED} ({cause})" if cause else f"{_DIED}; its log may say why")

    def _end(self, reason: str) -> None:
        """Cancel open calls and refuse later ones; the first reason stays."""
        if self._ended is None:
            self._ended = reason
            logger.info("the engine has ended: %s", reason)
        for task in self._open - {asyncio.current_task()}:
            task.cancel()

    async def _sample(
        self, request: GenerationRequest, interrupt: asyncio.Event | None
    ) -> Generation:
        partial_response = request.partial_response
        resumed = () if partial_response is None else partial_response.token_ids
        stops = () if self.stop_strings is None else self.stop_strings.strings
        params = sampling_params(request, self.end_token_ids, stops)
        name = str(next(self._numbers))
        output: CompletionOutput | None = None
        aborting = None
        if interrupt is not None:
            aborting = asyncio.create_task(self._abort_when(interrupt, name))
        try:
            await self._wait_until_ready(interrupt)
            if interrupt is not None and interrupt.is_set():
                raise GenerationInterruptedError(partial_response)
            keys_version = self._keys_version
            salt = None if keys_version is None else f"version-{keys_version}"
            prompt = tokens_input([*request.prompt_token_ids, *resumed], cache_salt=salt)
            lora_request = self._loader.lora_request
            async for update in self._llm.generate(prompt, params, name, lora_request=lora_request):
                output = update.outputs[0]
        except (EngineGenerateError, ValueError) as error:
            raise EngineError(f"vLLM could not generate: {error.__cause__ or error}") from error
        finally:
            if aborting is not None:
                aborting.cancel()
        return to_generation(output, partial_response, keys_version=keys_version)

    async def _wait_until_ready(self, interrupt: asyncio.Event | None) -> None:
        """Wait for the first policy or the interrupt."""
        events = [self._ready] if interrupt is None else [self._ready, interrupt]
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _abort_when(self, interrupt: asyncio.Event, name: str) -> None:
        """Abort a request, again and again: vLLM ignores the id of a request not yet queued."""
        await interrupt.wait()
        while True:
            await self._llm.abort(name)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _swap(self, weights: PolicyWeights) -> int:
        async with self._swap_order:
            with ExitStack() as files:
                # The lock keeps other swaps out: the version in use stays until this swap.
                written = self._loader.update(weights, in_use=self.policy_version)
                update = await asyncio.to_thread(files.enter_context, written)
                num_running = await self._swap_or_end(update, weights.policy_version)
        self.policy_version = weights.policy_version
        self._ready.set()
        return num_running

    async def _swap_or_end(self, update: Any, policy_version: int) -> int:
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                return await self._swap_between_steps(update, policy_version)
        except Exception as error:  # vLLM passes on any exception of its processes
            self._end_in_swap(policy_version, f"{type(error).__name__}: {error}")
            raise EngineError(self._ended) from error

    async def _swap_between_steps(self, update: Any, policy_version: int) -> int:
        """Load a version while vLLM is paused; return the number of running sequences."""
        in_use = self.policy_version
        # After a learner's restart a number may come again, with other weights.
        keeps = self._keeps_keys and in_use is not None and in_use < policy_version
        await self._llm.pause_generation(mode="keep", clear_cache=not keeps)
        try:
            num_running: int = self._llm.get_num_unfinished_requests()
            if in_use is None and self._vocabulary is not None:
                tokens = (self._vocabulary.num_tokens, list(self._vocabulary.holes))
                await self._llm.collective_rpc("sample_only", args=tokens)
            await self._loader.load(self._llm, update, policy_version)
            if self._keeps_keys:
                self._keys_version = policy_version
            if self._gauges is not None:
                found = await self._llm.collective_rpc("memory_of_device")
                if sizes := [each for each in found if each]:
                    fullest = max(sizes, key=lambda each: each[MemoryState.PEAK])
                    self._gauges.set_device_memory(fullest)
        except BaseException as error:  # also a cancelled swap
            # After half a swap some layers have no values, and a decoding step would kill vLLM's
            # process: the engine must end before the pause does.
            self._end_in_swap(policy_version, f"{type(error).__name__}: {error}")
            raise
        finally:
            if self._ended is None:
                await self._llm.resume_generation()
        return num_running

    def _end_in_swap(self, policy_version: int, what: str) -> None:
        fix = ""
        if self.policy_version is None:
            fix = "; if every worker says so, vLLM cannot take this model: use `engine: hf`"
        self._end(f"vLLM failed to load policy version {policy_version}: {what}{fix}")
