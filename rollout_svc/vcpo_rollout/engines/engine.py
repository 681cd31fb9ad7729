"""The contract of generation engines: token ids in; token ids, logprobs and version spans out.

`rollouts[].engine` names a class: `hf` and `vllm` by a short name, a user's own one by
`package.module:Class`. It has `load` (`EngineClass`) and what `Engine` describes, and keeps three
promises that training rests on:

    *Numbers*: a token's log-probability is that of the distribution it was drawn from, after the
        temperature, over the tokens of the model's vocabulary (`vcpo.service.vocabulary`). So a
        cut of the distribution (top-k, top-p) is not sampled from, and no draft decides.
    *Versions*: each token carries the version whose weights gave that distribution. A running
        sequence goes on with the new weights after a swap, its cache computed again with them; or
        its spans say by how many versions the keys that it reads are older.
    *Whole state*: once `swap_weights` returns, the model holds every parameter (rounded to its own
        format) and persistent buffer of the version, and no other. If not, the call raises.

An `EngineError` says what failed in one sentence, and becomes a typed failure of the prompt; eight
in a row end the worker with it. `InvalidRequestError` blames the request alone. Any other exception
of `generate` counts as an `EngineError` that names its type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import RolloutGroup
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo.wire.weights import Payload
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.gauges import RolloutGauges


class EngineError(RuntimeError):
    """Generation failed or the engine has ended; the worker reports a typed failure."""


class InvalidRequestError(EngineError):
    """The engine refuses a request, as any engine of this model would; it samples others."""


class PromptTooLongError(InvalidRequestError):
    """The prompt and the response that may follow do not fit into the model's context."""


class NonFiniteLogitsError(EngineError):
    """The policy's logits are not finite; no token can be drawn."""


class GenerationInterruptedError(RuntimeError):
    """The caller interrupted a generation.

    partial_response: every token sampled so far, resumed ones included; None if there is none.
    """

    def __init__(self, partial_response: PartialResponse | None) -> None:
        self.partial_response = partial_response
        num_tokens = len(partial_response.token_ids) if partial_response else 0
        super().__init__(f"interrupted after {num_tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to sample."""

    prompt_token_ids: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    temperature: float
    """Softmax temperature, above 0."""
    max_new_tokens: int
    """Largest number of tokens of the response, at least 1; those of `partial_response` count."""
    partial_response: PartialResponse | None = None
    """The response to resume, shorter than `max_new_tokens`; None starts a new one. The policy in
    use reads its tokens as context; their log-probabilities and versions do not change."""
    seed: int | None = None
    """Seeds the tokens of this response; None draws from the engine's own generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled sequence."""

    token_ids: tuple[int, ...]
    """Sampled tokens, at least one; those of the request's `partial_response` come first. Includes
    the end token, or those of the stop string, if one of them ended the response."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token in the distribution it was drawn from (float32, after
    temperature)."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions that sampled the tokens, in order."""
    finish_reason: FinishReason
    expert_routes: ExpertRoutes | None = None
    """The experts that computed the first tokens of prompt and response; None if nobody asked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightChanges:
    """The elements of a version that differ from an earlier version."""

    base_policy_version: int
    positions: Mapping[str, NDArray[np.signedinteger[Any]]]
    """Rising positions in the flat tensor, [num_changes], by tensor; other tensors are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyWeights:
    """One published version, complete and verified."""

    policy_version: int
    payload: Payload
    """A safetensors file with every parameter and persistent buffer under its `transformers` name.
    After the swap the next version may be written into it: who needs it longer copies it."""
    changes: WeightChanges | None = None
    """Elements that differ from a base version, if they are known: an engine that uses that version
    may write only these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """What an engine is made from."""

    spec: VCPORunSpec
    """The run. `model.name` is a folder, or a name on the Hugging Face hub."""
    group: RolloutGroup
    """The worker's rollout group: precision, slots, threads."""
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: frozenset[int]
    stop_strings: StopStrings | None
    """Strings that end a response; None if only end tokens do."""
    seed: int
    """Seeds what requests do not seed; every worker has its own."""
    online_quantization: str | None = None
    """Quantization that vLLM applies when it loads weights, by vLLM's name for it. Other engines
    get weights that the worker has rounded."""
    serves_adapters: bool = False
    """Whether versions are adapters that vLLM applies beside the base model. Other engines get
    versions of all parameters."""


class EngineClass(Protocol):
    """The class that `rollouts[].engine` names."""

    def load(self, *, setting: EngineSetting, **arguments: Any) -> Engine:
        """Make the engine (a class method). It may block; weights come with the first swap.

        arguments: those of `rollouts[].engineArguments`; the signature says which it knows.

        Raises:
            ValueError: beginning with the field, when the user must correct something.
        """


class SequenceSampler(Protocol):
    """Samples sequences, several at a time."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a response."""

    @property
    def stop_strings(self) -> StopStrings | None:
        """Strings that end a response; None if only end tokens do."""

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence.

        interrupt: once it is set, before or during the call, the sequence stops at the next
            decoding step. One event may interrupt many sequences. A sequence that is complete by
            then is returned.

        Raises:
            GenerationInterruptedError: with the tokens so far, when `interrupt` was set.
            EngineError: when generation failed or the engine is closed.
        """


class Engine(SequenceSampler, Protocol):
    """Samples from the newest policy it was given.

    `generate` may be called concurrently; the engine batches the calls. A swap takes effect between
    two decoding steps: running sequences continue with the new weights, and each token carries the
    version that sampled it. Generation waits for the first swap.
    """

    @property
    def policy_version(self) -> int | None:
        """Version in use; None before the first swap."""

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and response together; None if there is no limit."""

    async def swap_weights(self, weights: PolicyWeights) -> int:
        """Use `weights` from the next decoding step on; return once they are in use.

        Returns: how many running sequences continue with them.

        Raises:
            EngineError: when the tensors do not fit the model; the old weights stay in use.
            StartError: for the first weights, when the engine cannot run such a model.
        """

    async def close(self) -> None:
        """Stop the engine; running generations raise EngineError."""


@runtime_checkable
class ObservableEngine(Protocol):
    """An engine that knows what its decoding steps do, or what its device holds."""

    def export_to(self, gauges: RolloutGauges) -> None:
        """Export what it knows from now on."""
