"""An engine of one's own: one whole forward pass for each token, without a cache or a batch.

It is the slowest engine that is right, and shows what every engine must do:

    rollouts: [{name: main, engine: "plain_engine:PlainEngine", engineArguments: {pause_ms: 0}}]
"""

import asyncio
from itertools import groupby
from typing import Self

import torch
from transformers import PreTrainedModel

from vcpo.service.vocabulary import vocabulary_of
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    EngineError,
    EngineSetting,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.engines.limits import RequestLimits
from vcpo_rollout.engines.loading import load_model_skeleton, place_model, torch_dtype
from vcpo_rollout.engines.loading_weights import copy_weights, stage_weights
from vcpo_rollout.engines.seeds import token_seed


class PlainEngine:
    """Samples with a `transformers` model on the CPU. Owner: the worker's event loop.

    pause_ms: time to wait after each token, in milliseconds.
    """

    def __init__(self, model: PreTrainedModel, setting: EngineSetting, *, pause_ms: float) -> None:
        self.policy_version: int | None = None
        self.end_token_ids = setting.end_token_ids
        self.stop_strings = setting.stop_strings
        self._limits = RequestLimits.of(model, setting.group.max_model_len)
        self.context_tokens = self._limits.context_tokens
        self._model = model.eval()
        self._pause_s = pause_ms / 1000
        self._unseeded = torch.Generator().manual_seed(setting.seed)
        self._ready = asyncio.Event()
        self._step = asyncio.Lock()
        """Held by whoever uses the model: one decoding step, or one swap."""
        self._num_running = 0
        self._is_closed = False

    @classmethod
    def load(cls, *, setting: EngineSetting, pause_ms: float = 0.0) -> Self:
        """Build the model; its parameters come with the first swap."""
        if pause_ms < 0:
            raise ValueError(f"spec.rollouts[].engineArguments.pause_ms: {pause_ms} is negative")
        spec = setting.spec
        model = load_model_skeleton(
            spec.model.name,
            revision=spec.model.revision,
            trust_remote_code=spec.model.trust_remote_code,
            precision=setting.group.number_format,
            context_tokens=spec.context_tokens,
        )
        place_model(model, torch.device("cpu"), torch_dtype(setting.group.number_format))
        return cls(model, setting, pause_ms=pause_ms)

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence; it waits for the first swap."""
        self._limits.check(request)  # an InvalidRequestError blames the request, not the engine
        await self._ready.wait()
        begun = request.partial_response
        token_ids = list(begun.token_ids) if begun else []
        logprobs = list(begun.logprobs) if begun else []
        versions = [
            span.policy_version
            for span in (begun.version_spans if begun else ())
            for _ in range(span.num_tokens)
        ]
        self._num_running += 1
        try:
            while True:
                if interrupt is not None and interrupt.is_set():
                    raise GenerationInterruptedError(_partial(token_ids, logprobs, versions))
                async with self._step:
                    if self._is_closed or self.policy_version is None:
                        raise EngineError("the engine is closed")
                    # The version cannot change before the lock is free: it is the token's own.
                    version = self.policy_version
                    token, logprob = await asyncio.to_thread(self._next_token, request, token_ids)
                token_ids.append(token)
                logprobs.append(logprob)
                versions.append(version)
                if (reason := self._end(request, token_ids)) is not None:
                    return Generation(
                        token_ids=tuple(token_ids),
                        logprobs=tuple(logprobs),
                        version_spans=_spans(versions),
                        finish_reason=reason,
                    )
                await asyncio.sleep(self._pause_s)
        finally:
            self._num_running -= 1

    async def swap_weights(self, weights: PolicyWeights) -> int:
        """Use a version from the next token on."""
        async with self._step:
            await asyncio.to_thread(self._swap, weights)
            self.policy_version = weights.policy_version
        self._ready.set()
        return self._num_running

    async def close(self) -> None:
        """Stop after the current token; running generations raise EngineError."""
        self._is_closed = True
        self._ready.set()

    def _swap(self, weights: PolicyWeights) -> None:
        copy_weights(self._model, stage_weights(self._model, weights, in_use=self.policy_version))

    @torch.inference_mode()
    def _next_token(self, request: GenerationRequest, token_ids: list[int]) -> tuple[int, float]:
        """Draw a token; return it and its log-probability in the distribution it was drawn from."""
        context = [*request.prompt_token_ids, *token_ids]
        logits = self._model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        vocabulary = vocabulary_of(self._model)
        if vocabulary is not None:  # a head may have rows that are no token
            logits[list(vocabulary.holes)] = -torch.inf
            logits = logits[: vocabulary.num_tokens]
        logprobs = torch.log_softmax(logits.float() / request.temperature, dim=-1)
        generator = self._unseeded
        if request.seed is not None:  # so a token does not depend on its neighbours
            generator = torch.Generator().manual_seed(token_seed(request.seed, len(context)))
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        return token, float(logprobs[token])

    def _end(self, request: GenerationRequest, token_ids: list[int]) -> FinishReason | None:
        """Return how a response ends with its last token; None if it goes on."""
        stops = self.stop_strings
        if token_ids[-1] in self.end_token_ids or (
            stops is not None and stops.completed_by_last(token_ids)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= request.max_new_tokens else None


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(policy_version=version, num_tokens=len(list(tokens)))
        for version, tokens in groupby(versions)
    )


def _partial(
    token_ids: list[int], logprobs: list[float], versions: list[int]
) -> PartialResponse | None:
    """Return what an interrupted response has so far, for whoever resumes it."""
    if not token_ids:
        return None
    return PartialResponse(
        token_ids=tuple(token_ids), logprobs=tuple(logprobs), version_spans=_spans(versions)
    )
