"""One prompt's answers: sampled side by side, gone on with where they were begun, cut together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vcpo.wire.trajectory import PartialResponse
from vcpo_rollout.engines.engine import (
    Engine,
    Generation,
    GenerationCutError,
    GenerationRequest,
)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How an answer ended that was cut; without anything begun, before its first token."""

    begun: PartialResponse | None


class GroupCutError(RuntimeError):
    """A group was cut before all of its answers were complete.

    begun: what there is of each answer that has a token at all, those complete included.
    """

    def __init__(self, begun: Sequence[PartialResponse]) -> None:
        self.begun = tuple(begun)
        super().__init__(f"cut with {len(self.begun)} answers begun")


async def sample_group(
    engine: Engine,
    request: GenerationRequest,
    count: int,
    *,
    begun: Sequence[PartialResponse] = (),
    cut: asyncio.Event,
) -> list[Generation]:
    """Sample `count` answers; when one fails the others stop too, and free their places.

    begun: at most as many answers, each gone on with, or taken as it is when it is complete.

    Raises:
        GroupCutError: when `cut` was set before enough answers were complete.
        EngineError: when an answer could not be generated.
    """
    starts = [*begun, *[None] * (count - len(begun))]
    answering = (go_on(engine, replace(request, begun=start), cut) for start in starts)
    return await all_complete(answering, as_partial=_as_partial)


async def all_complete(
    answering: Iterable[Coroutine[Any, Any, _Answer]],
    *,
    as_partial: Callable[[_Answer], PartialResponse],
) -> list[_Answer]:
    """Sample the responses side by side; the first error stops the others.

    answering: each may raise GenerationCutError; any other error of one ends all.
    as_partial: converts a complete response, which is released with the others of its group.

    Raises:
        GroupCutError: when one was interrupted.
    """
    tasks = [asyncio.create_task(_end_of(each)) for each in answering]
    try:
        ends = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    complete = [end for end in ends if not isinstance(end, _Cut)]
    if len(complete) < len(ends):
        begun = (end.begun if isinstance(end, _Cut) else as_partial(end) for end in ends)
        raise GroupCutError([one for one in begun if one is not None])
    return complete


async def go_on(engine: Engine, request: GenerationRequest, cut: asyncio.Event) -> Generation:
    """Sample one sequence, or take it as it is when what was begun of it is complete.

    Raises:
        GenerationCutError: with what was sampled, when it was cut.
        EngineError: when generation failed.
    """
    begun = request.begun
    if begun is None or begun.finish_reason is None:
        return await engine.generate(request, cut=cut)
    return Generation(
        token_ids=begun.token_ids,
        logprobs=begun.logprobs,
        version_spans=begun.version_spans,
        finish_reason=begun.finish_reason,
    )


async def _end_of(answering: Coroutine[Any, Any, _Answer]) -> _Answer | _Cut:
    try:
        return await answering
    except GenerationCutError as error:
        return _Cut(error.begun)


def _as_partial(generation: Generation) -> PartialResponse:
    return PartialResponse(
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        version_spans=generation.version_spans,
        finish_reason=generation.finish_reason,
    )
