"""One prompt's answers: sampled side by side, gone on with where they were begun, cut together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vcpo.wire.trajectory import PartialResponse
from vcpo_rollout.engines.engine import (
    Engine,
    Generation,
    GenerationCutError,
    GenerationRequest,
)

_End = Generation | PartialResponse | None
"""An answer that is complete, that was cut, or that was cut before its first token."""


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
    num_redundant: int = 0,
    begun: Sequence[PartialResponse] = (),
    cut: asyncio.Event,
) -> list[Generation]:
    """Sample `count` answers; when one fails the others stop too, and free their places.

    num_redundant: answers sampled besides; the first `count` to be complete are returned, and the
        others stop. They favour short answers.
    begun: at most as many answers, each gone on with, or taken as it is when it is complete.

    Raises:
        GroupCutError: when `cut` was set before enough answers were complete.
        EngineError: when an answer could not be generated.
    """
    starts = [*begun, *[None] * (count + num_redundant - len(begun))]
    sampling = [asyncio.create_task(_answer(engine, request, start, cut)) for start in starts]
    try:
        ends = await _first_complete(sampling, count)
    finally:
        for task in sampling:
            task.cancel()
    complete = [end for end in ends if isinstance(end, Generation)]
    if len(complete) < count:
        raise GroupCutError([_as_partial(end) for end in ends if end is not None])
    return complete[:count]


async def _first_complete(sampling: Sequence[asyncio.Task[_End]], count: int) -> list[_End]:
    """How the answers ended, in their order, as soon as `count` are complete or all have ended."""
    pending = set(sampling)
    while True:
        ends = [task.result() for task in sampling if task not in pending]
        if not pending or sum(isinstance(end, Generation) for end in ends) >= count:
            return ends
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def _answer(
    engine: Engine,
    request: GenerationRequest,
    start: PartialResponse | None,
    cut: asyncio.Event,
) -> _End:
    if start is not None and start.finish_reason is not None:
        return Generation(
            token_ids=start.token_ids,
            logprobs=start.logprobs,
            version_spans=start.version_spans,
            finish_reason=start.finish_reason,
        )
    try:
        return await engine.generate(replace(request, begun=start), cut=cut)
    except GenerationCutError as error:
        return error.begun


def _as_partial(end: Generation | PartialResponse) -> PartialResponse:
    if isinstance(end, PartialResponse):
        return end
    return PartialResponse(
        token_ids=end.token_ids,
        logprobs=end.logprobs,
        version_spans=end.version_spans,
        finish_reason=end.finish_reason,
    )
