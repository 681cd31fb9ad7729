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

    begun: at most `count` answers, each gone on with, or taken as it is when it is complete.

    Raises:
        GroupCutError: when `cut` was set in time to cut at least one answer.
        EngineError: when an answer could not be generated.
    """
    starts = [*begun, *[None] * (count - len(begun))]
    sampling = [asyncio.create_task(_answer(engine, request, start, cut)) for start in starts]
    try:
        ends = await asyncio.gather(*sampling)
    finally:
        for task in sampling:
            task.cancel()
    complete = [end for end in ends if isinstance(end, Generation)]
    if len(complete) < count:
        raise GroupCutError([_as_partial(end) for end in ends if end is not None])
    return complete


async def _answer(
    engine: Engine,
    request: GenerationRequest,
    start: PartialResponse | None,
    cut: asyncio.Event,
) -> Generation | PartialResponse | None:
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
