"""The engine seam: token ids in; token ids, log-probabilities and version spans out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan


class EngineError(RuntimeError):
    """Generation failed or the engine is gone; the worker reports a typed failure."""


class GenerationInterruptedError(RuntimeError):
    """The caller interrupted a generation.

    partial_response: every token sampled so far, resumed ones included; None if there is none.
    """

    def __init__(self, partial_response: PartialResponse | None) -> None:
        self.partial_response = partial_response
        super().__init__(
            f"interrupted after {len(partial_response.token_ids) if partial_response else 0} tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to sample."""

    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    temperature: float
    """Softmax temperature, above 0."""
    max_new_tokens: int
    """At least 1; counts the tokens of `partial_response`."""
    partial_response: PartialResponse | None = None
    """Unfinished answer to go on from, shorter than `max_new_tokens`; None starts afresh. Its
    tokens are read by the policy in use and keep the log-probabilities and versions they came
    with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled sequence."""

    token_ids: tuple[int, ...]
    """Sampled tokens, at least one; those of the request's `partial_response` come first. Includes
    the end token if the model ended its response."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token in the distribution it was drawn from (float32, after
    temperature)."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy version sampled which tokens, in order."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightChanges:
    """Which elements of a version differ from an earlier one."""

    base_policy_version: int
    positions: Mapping[str, NDArray[np.int64]]
    """By tensor: rising positions in the flat tensor, [num_changes]; other tensors are equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyWeights:
    """One published version, complete and checked."""

    policy_version: int
    payload: bytes
    """A safetensors file with every parameter under its `transformers` name."""
    changes: WeightChanges | None = None
    """What an engine that uses the base version need write, if it is known; it may write all."""


class Engine(Protocol):
    """Samples from the newest policy it was given.

    `generate` may be called many times concurrently; the engine batches. A swap takes effect
    between two decoding steps: sequences under way go on with the new weights, and each token is
    labelled with the version that sampled it. Nothing is generated before the first swap.
    """

    @property
    def policy_version(self) -> int | None:
        """Version in use; None before the first swap."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence.

        interrupt: once it is set, before or during the call, the sequence stops at the next
            decoding step. One event may interrupt many sequences. A sequence that is complete by
            then is returned.

        Raises:
            GenerationInterruptedError: with what was sampled, when it was cut.
            EngineError: when generation failed or the engine is closed.
        """

    async def swap_weights(self, weights: PolicyWeights) -> int:
        """Use `weights` from the next decoding step on; returns when they are in use.

        Returns: how many sequences under way go on with them.

        Raises:
            EngineError: when the tensors do not fit the model; the old weights stay in use.
        """

    async def close(self) -> None:
        """Stop; generations under way fail with EngineError."""
