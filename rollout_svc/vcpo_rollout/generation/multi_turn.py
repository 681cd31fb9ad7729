"""Answers in several turns: the model speaks, the environment replies, until one of them ends it.

```
prompt | sampled | inserted | sampled | inserted | sampled        what the engine is given next is
       +------------------- response ------------------+          always all of it, token by token
```

What the model said is never turned into text and back: another cut into tokens would be a sequence
that nobody sampled, and its log-probabilities would be of something else. What the environment says
is cut into tokens once, when it is said, and marked in the trajectory as not sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import FinishReason, PartialResponse, Trajectory
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import (
    Engine,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
)
from vcpo_rollout.environments.environment import Conversation
from vcpo_rollout.generation.environment_pool import (
    EnvironmentThreads,
    check_reward,
    environment_errors,
    require_type,
)
from vcpo_rollout.generation.group_sampling import complete_response
from vcpo_rollout.generation.history import History, Turn, replied_turns


async def resume(
    begin: Callable[[], Conversation],
    request: GenerationRequest,
    partial_response: PartialResponse,
    *,
    codec: PromptCodec,
    end_token_ids: frozenset[int],
    threads: EnvironmentThreads,
) -> tuple[Conversation, History] | None:
    """Bring a new conversation to where somebody else's was cut.

    begin: opens a conversation about the prompt of `request`.

    Returns: None when the environment does not say again what it said then: what the model has said
        since would follow other words.

    Raises:
        EnvironmentFailedError: when the environment's code fails.
    """
    replied = replied_turns(partial_response, end_token_ids)
    conversation = await threads.call(partial(_replayed, begin, replied, codec, end_token_ids))
    if conversation is None:
        return None
    return conversation, History.resume(request, partial_response, replied, end_token_ids)


async def converse(
    trajectory_id: str,
    conversation: Conversation,
    history: History,
    *,
    engine: Engine,
    codec: PromptCodec,
    threads: EnvironmentThreads,
    interrupt: asyncio.Event,
) -> Trajectory:
    """Hold one conversation to its end and have it judged.

    history: what was said before, which `conversation` has heard; its request bounds the whole
        response, replies included.
    interrupt: once it is set, the conversation stops at the next decoding step, or at once if it
        waits for a reply.

    Raises:
        GenerationInterruptedError: with what was said, when it was cut.
        EngineError: when a turn could not be sampled.
        EnvironmentFailedError: when the environment's code fails, or its reward is no number.
    """
    while True:
        generation = await _next_turn(history, engine, interrupt)
        finish_reason = generation.finish_reason
        text = codec.decode(generation.token_ids, engine.end_token_ids)
        hearing = threads.call(partial(_reply, conversation, text))
        is_last = history.is_full or finish_reason is FinishReason.LENGTH
        reply = await (hearing if is_last else _unless_cut(hearing, history, interrupt))
        if reply is None or finish_reason is FinishReason.LENGTH:
            break
        if not history.insert(_encoded(codec, reply, generation.token_ids, engine.end_token_ids)):
            finish_reason = FinishReason.LENGTH
            break
    return Trajectory(
        trajectory_id=trajectory_id,
        prompt_token_ids=history.request.prompt_token_ids,
        response_token_ids=tuple(history.token_ids),
        rollout_logprobs=tuple(history.logprobs),
        version_spans=tuple(history.version_spans),
        reward=await threads.call(partial(_reward, conversation)),
        finish_reason=finish_reason,
        inserted_spans=tuple(history.inserted_spans),
    )


async def _next_turn(history: History, engine: Engine, interrupt: asyncio.Event) -> Generation:
    """Sample a turn, or the rest of it, into the history."""
    try:
        generation = await complete_response(engine, history.next_request(), interrupt)
    except GenerationInterruptedError as error:
        if error.partial_response is not None:
            history.sampled(error.partial_response)
        raise GenerationInterruptedError(history.partial()) from error
    history.sampled(generation)
    return generation


async def _unless_cut(
    hearing: Coroutine[Any, Any, str | None], history: History, interrupt: asyncio.Event
) -> str | None:
    """Wait for a reply, or for the cut: a program that a tool runs may take longer than a drain."""
    replying, cutting = asyncio.create_task(hearing), asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({replying, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if not replying.done():
            raise GenerationInterruptedError(history.partial())
        return replying.result()
    finally:
        replying.cancel()
        cutting.cancel()


def _replayed(
    begin: Callable[[], Conversation],
    replied: Sequence[Turn],
    codec: PromptCodec,
    end_token_ids: frozenset[int],
) -> Conversation | None:
    """A conversation that has heard these turns, if it replied to each as is recorded."""
    conversation = begin()
    for turn in replied:
        reply = _reply(conversation, codec.decode(turn.sampled, end_token_ids))
        if reply is None or _encoded(codec, reply, turn.sampled, end_token_ids) != turn.inserted:
            return None
    return conversation


def _encoded(
    codec: PromptCodec, reply: str, turn: Sequence[int], end_token_ids: frozenset[int]
) -> tuple[int, ...]:
    with environment_errors(FailureCause.REPLY):
        return codec.encode_reply(reply, turn[-1], end_token_ids)


def _reply(conversation: Conversation, text: str) -> str | None:
    with environment_errors(FailureCause.REPLY):
        reply = conversation.next_turn(text)
    return None if reply is None else require_type(reply, str, conversation.next_turn)


def _reward(conversation: Conversation) -> float:
    with environment_errors(FailureCause.REWARD):
        reward = conversation.reward()
    return check_reward(reward, conversation.reward)
