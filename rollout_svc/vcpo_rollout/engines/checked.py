"""An engine whose answers are checked against the contract of `vcpo_rollout.engines.engine`.

The checks cost microseconds for each response. Shipped engines pass them like a user's own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NoReturn

from vcpo.service.lifecycle import StartError
from vcpo.wire.packing import HIGHEST_LOGPROB, LOWEST_LOGPROB
from vcpo.wire.trajectory import PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    Engine,
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    ObservableEngine,
    PolicyWeights,
)
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.gauges import RolloutGauges

ENGINE_METHODS: Final = ("load", "generate", "swap_weights", "close")
"""The methods that an engine's class must have."""
_PROPERTIES: Final = ("policy_version", "context_tokens", "end_token_ids", "stop_strings")


def lacking_of_engine(loaded: object) -> list[str]:
    """Return what an object lacks to be called as an engine, by name."""
    missing = [each for each in _PROPERTIES if not hasattr(loaded, each)]
    coroutines = ENGINE_METHODS[1:]
    return missing + [
        f"async {each}"
        for each in coroutines
        if not inspect.iscoroutinefunction(getattr(loaded, each, None))
    ]


class CheckedEngine:
    """Passes calls on to an engine; an `Engine`. Owner: the worker's event loop.

    An answer that breaks the contract is an EngineError that names the class and the method, and
    so is any exception that the contract does not name.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._class = type(engine).__name__
        self._open: list[set[int]] = []
        """Versions that may have sampled the tokens of each running `generate`."""
        self._coming: set[int] = set()
        """Versions that are being swapped in."""

    @property
    def policy_version(self) -> int | None:
        """Version in use; None before the first swap."""
        return self._engine.policy_version

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and response together; None if there is no limit."""
        return self._engine.context_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        return self._engine.end_token_ids

    @property
    def stop_strings(self) -> StopStrings | None:
        """Strings that end a response; None if only end tokens do."""
        return self._engine.stop_strings

    def export_to(self, gauges: RolloutGauges) -> None:
        """Export what the engine knows of itself from now on."""
        if isinstance(self._engine, ObservableEngine):
            self._engine.export_to(gauges)

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence.

        Raises:
            GenerationInterruptedError: with the tokens so far, when `interrupt` was set.
            EngineError: when generation failed, or what it returned breaks the contract.
        """
        in_use = self.policy_version
        versions = self._coming | (set() if in_use is None else {in_use})
        self._open.append(versions)
        try:
            generation = await self._engine.generate(request, interrupt=interrupt)
        except GenerationInterruptedError as interrupted:
            if interrupted.partial_response is not None:
                for problem in _problems(request, interrupted.partial_response, versions):
                    self._blame(f"generate was interrupted with {problem}")
            raise
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - an engine may be a user's
            self._fail("generate", error)
        finally:
            self._open = [each for each in self._open if each is not versions]
        if not isinstance(generation, Generation):
            self._blame(f"generate returned {generation!r:.100}, which is no Generation")
        for problem in _problems(request, generation, versions):
            self._blame(f"generate returned {problem}")
        return generation

    async def swap_weights(self, weights: PolicyWeights) -> int:
        """Use `weights` from the next decoding step on.

        Returns: how many running sequences continue with them.

        Raises:
            EngineError: when the engine refuses the version, fails, or does not use it then.
            StartError: for the first weights, when the engine cannot run such a model.
        """
        version = weights.policy_version
        for versions in (self._coming, *self._open):
            versions.add(version)
        try:
            num_running = await self._engine.swap_weights(weights)
        except (EngineError, StartError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._fail("swap_weights", error)
        finally:
            self._coming.discard(version)
        if self.policy_version != version:
            self._blame(
                f"swap_weights returned, and policy_version is {self.policy_version} instead of"
                f" {version}"
            )
        if not isinstance(num_running, int) or num_running < 0:
            self._blame(
                f"swap_weights returned {num_running!r:.100}, which is no number of sequences"
            )
        return num_running

    async def close(self) -> None:
        """Stop the engine; running generations raise EngineError."""
        await self._engine.close()

    def _fail(self, method: str, error: Exception) -> NoReturn:
        raise EngineError(f"{self._class}.{method}: {type(error).__name__}: {error}") from error

    def _blame(self, what: str) -> NoReturn:
        raise EngineError(
            f"{self._class}.{what}; correct the class (`vcpo_rollout.engines.engine`)"
        )


def _problems(
    request: GenerationRequest,
    generation: Generation | PartialResponse,
    known_versions: Collection[int],
) -> Iterator[str]:
    """Yield how a response, whole or interrupted, breaks the contract, each as what came.

    known_versions: those that were in use during the call.
    """
    resumed: tuple[Any, ...] = ()
    if request.partial_response is not None:
        resumed = tuple(request.partial_response.token_ids)
    start, num_tokens = len(resumed), len(generation.token_ids)
    # An interruption may come before the first token of a resumed response.
    least = start + 1 if isinstance(generation, Generation) else max(start, 1)
    if not least <= num_tokens <= request.max_new_tokens:
        yield f"{num_tokens} tokens, not {least} to {request.max_new_tokens}"
    if tuple(generation.token_ids[:start]) != resumed:
        yield "other tokens than those of the partial response that it resumes"
    if len(generation.logprobs) != num_tokens:
        yield f"{len(generation.logprobs)} log-probabilities for {num_tokens} tokens"
    for logprob in generation.logprobs:
        if not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:  # also of NaN
            yield f"the log-probability {logprob}, outside {LOWEST_LOGPROB:g} to 0"
    yield from _span_problems(generation.version_spans, start, num_tokens, known_versions)


def _span_problems(
    spans: Sequence[VersionSpan], start: int, num_tokens: int, known_versions: Collection[int]
) -> Iterator[str]:
    """Yield what is wrong with the spans over tokens of which those from `start` on are new."""
    for span in spans:
        if not 0 <= span.key_age_versions <= span.policy_version:
            yield f"keys {span.key_age_versions} versions older than version {span.policy_version}"
    versions = list(chain.from_iterable([each.policy_version] * each.num_tokens for each in spans))
    if len(versions) != num_tokens:
        yield f"version spans over {len(versions)} tokens for {num_tokens} tokens"
    if unknown := set(versions[start:]) - set(known_versions):
        yield (
            f"tokens of version {min(unknown)}; only {sorted(known_versions)} were in use during"
            " the call"
        )
