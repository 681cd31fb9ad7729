"""Samples the responses to one prompt side by side, and interrupts them together."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from vcpo.wire.trajectory import PartialResponse
from vcpo_rollout.engines.engine import (
    Engine,
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    SequenceSampler,
)

_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class _Interrupted:
    """A response that was interrupted; None means before its first token."""

    partial_response: PartialResponse | None


class GroupInterruptedError(RuntimeError):
    """A group was interrupted before all of its responses were complete.

    partial_responses: every response with at least one token, complete ones included; each has its
        number in the group.
    """

    def __init__(self, partial_responses: Sequence[PartialResponse]) -> None:
        self.partial_responses = tuple(partial_responses)
        super().__init__(f"interrupted with {len(self.partial_responses)} responses started")


async def sample_group(
    engine: Engine, requests: Mapping[int, GenerationRequest], *, interrupt: asyncio.Event
) -> dict[int, Generation]:
    """Sample the responses of a group; the first error stops the others and frees their slots.

    requests: by number in the group; a partial response is resumed, or returned if it is complete.

    Raises:
        GroupInterruptedError: when `interrupt` was set before all responses were complete.
        EngineError: when the engine could not generate a response.
    """
    responses = {
        number: partial(complete_response, engine, request, interrupt)
        for number, request in requests.items()
    }
    return await gather_complete(responses, to_partial_response=_to_partial_response)


async def gather_complete(
    responses: Mapping[int, Callable[[], Awaitable[_Response]]],
    *,
    to_partial_response: Callable[[_Response], PartialResponse],
) -> dict[int, _Response]:
    """Make the responses side by side; the first error stops the others.

    responses: by number in the group; each may raise GenerationInterruptedError; any other error
        ends the group.
    to_partial_response: converts a complete response, which is released with the others if the
        group is interrupted.

    Raises:
        GroupInterruptedError: when at least one response was interrupted.
    """
    tasks = [asyncio.create_task(_catch_interrupt(one)) for one in responses.values()]
    try:
        ends = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    numbered = dict(zip(responses, ends, strict=True))
    complete = {
        number: end for number, end in numbered.items() if not isinstance(end, _Interrupted)
    }
    if len(complete) < len(ends):
        released = {
            number: end.partial_response
            if isinstance(end, _Interrupted)
            else to_partial_response(end)
            for number, end in numbered.items()
        }
        raise GroupInterruptedError(
            [replace(one, number=number) for number, one in released.items() if one is not None]
        )
    return complete


async def complete_response(
    engine: SequenceSampler, request: GenerationRequest, interrupt: asyncio.Event
) -> Generation:
    """Sample one response, or return the request's partial response if it is complete already.

    Raises:
        GenerationInterruptedError: with the tokens so far, when `interrupt` was set.
        EngineError: when generation failed.
    """
    partial_response = request.partial_response
    if partial_response is None or partial_response.finish_reason is None:
        try:
            return await engine.generate(request, interrupt=interrupt)
        except (EngineError, GenerationInterruptedError):
            raise
        except Exception as error:  # an engine may be a user's
            method = f"{type(engine).__name__}.generate"
            raise EngineError(f"{method}: {type(error).__name__}: {error}") from error
    return Generation(
        token_ids=partial_response.token_ids,
        logprobs=partial_response.logprobs,
        version_spans=partial_response.version_spans,
        finish_reason=partial_response.finish_reason,
    )


async def _catch_interrupt(make: Callable[[], Awaitable[_Response]]) -> _Response | _Interrupted:
    try:
        return await make()
    except GenerationInterruptedError as error:
        return _Interrupted(error.partial_response)


def _to_partial_response(generation: Generation) -> PartialResponse:
    return PartialResponse(
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        version_spans=generation.version_spans,
        finish_reason=generation.finish_reason,
    )
