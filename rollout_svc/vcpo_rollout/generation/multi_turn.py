"""Multi-turn responses: model and environment take turns until one of them ends the conversation.

```
prompt | sampled | inserted | sampled | inserted | sampled        for each turn the engine gets
       +------------------- response ------------------+          all tokens before it
```

The sampled tokens are never decoded and encoded again. Another tokenization of the same text would
be a sequence that was not sampled, and the log-probabilities would not belong to it. The worker
encodes each reply of the environment once and marks its tokens in the trajectory as not sampled.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import FinishReason, PartialResponse, Trajectory
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import (
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    SequenceSampler,
)
from vcpo_rollout.environments.environment import Conversation
from vcpo_rollout.generation.environment_pool import (
    EnvironmentThreads,
    Judgement,
    check_judgement,
    environment_errors,
    require_type,
)
from vcpo_rollout.generation.group_sampling import complete_response
from vcpo_rollout.generation.history import Endings, History, Turn, replied_turns


async def resume(
    begin: Callable[[], Conversation],
    request: GenerationRequest,
    partial_response: PartialResponse,
    *,
    codec: PromptCodec,
    endings: Endings,
    threads: EnvironmentThreads,
) -> tuple[Conversation, History] | None:
    """Bring a new conversation to the state in which another worker's was interrupted.

    begin: opens a conversation about the prompt of `request`.
    endings: of the engine.

    Returns: None when the environment gives other replies than before; the later turns of the
        model would then follow other words.
    """
    turns = replied_turns(partial_response, endings)
    conversation = await threads.call(partial(_replay, begin, turns, codec, endings.token_ids))
    if conversation is None:
        return None
    return conversation, History.resume(request, partial_response, turns, endings)


async def converse(
    trajectory_id: str,
    conversation: Conversation,
    history: History,
    *,
    engine: SequenceSampler,
    codec: PromptCodec,
    threads: EnvironmentThreads,
    interrupt: asyncio.Event,
) -> Trajectory:
    """Hold one conversation to its end and judge it.

    history: the turns that `conversation` knows already; its request bounds the whole response,
        replies included.
    interrupt: once it is set, the conversation stops at the next decoding step, or at once if it
        waits for a reply.

    Raises:
        GenerationInterruptedError: with the tokens so far, when `interrupt` was set.
        EngineError: when the engine could not sample a turn.
        EnvironmentFailedError: when the environment's code fails, or its reward is no number.
    """
    while True:
        generation = await _sample_turn(history, engine, interrupt)
        finish_reason = generation.finish_reason
        text = codec.decode(generation.token_ids, engine.end_token_ids)
        replying = threads.call(partial(_reply, conversation, text))
        is_last = history.is_full or finish_reason is FinishReason.LENGTH
        reply = await (replying if is_last else _wait_for_reply(replying, history, interrupt))
        if reply is None or finish_reason is FinishReason.LENGTH:
            break
        inserted = _encode_reply(codec, reply, generation.token_ids, engine.end_token_ids)
        if not history.insert(inserted):
            finish_reason = FinishReason.LENGTH
            break
    judgement = await threads.call(partial(_judge, conversation))
    return Trajectory(
        trajectory_id=trajectory_id,
        prompt_token_ids=history.request.prompt_token_ids,
        response_token_ids=tuple(history.token_ids),
        rollout_logprobs=tuple(history.logprobs),
        version_spans=tuple(history.version_spans),
        reward=judgement.reward,
        reward_parts=judgement.parts,
        finish_reason=finish_reason,
        inserted_spans=tuple(history.inserted_spans),
        # The last turn read all turns before it.
        expert_routes=generation.expert_routes,
    )


async def _sample_turn(
    history: History, engine: SequenceSampler, interrupt: asyncio.Event
) -> Generation:
    """Sample the next turn, or the rest of the open one, and append it to the history."""
    try:
        generation = await complete_response(engine, history.next_request(), interrupt)
    except GenerationInterruptedError as error:
        if error.partial_response is not None:
            history.append_sampled(error.partial_response)
        raise GenerationInterruptedError(history.to_partial_response()) from error
    history.append_sampled(generation)
    return generation


async def _wait_for_reply(
    replying: Coroutine[Any, Any, str | None], history: History, interrupt: asyncio.Event
) -> str | None:
    """Wait for a reply or the interrupt: a tool's program may run longer than a drain."""
    reply = asyncio.create_task(replying)
    interrupted = asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({reply, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise GenerationInterruptedError(history.to_partial_response())
        return reply.result()
    finally:
        reply.cancel()
        interrupted.cancel()


def _replay(
    begin: Callable[[], Conversation],
    turns: Sequence[Turn],
    codec: PromptCodec,
    end_token_ids: frozenset[int],
) -> Conversation | None:
    """Return a conversation that has taken these turns; None if one of its replies differs."""
    conversation = begin()
    for turn in turns:
        reply = _reply(conversation, codec.decode(turn.sampled, end_token_ids))
        if reply is None:
            return None
        if _encode_reply(codec, reply, turn.sampled, end_token_ids) != turn.inserted:
            return None
    return conversation


def _encode_reply(
    codec: PromptCodec, reply: str, turn: Sequence[int], end_token_ids: frozenset[int]
) -> tuple[int, ...]:
    with environment_errors(FailureCause.REPLY):
        return codec.encode_reply(reply, turn[-1], end_token_ids)


def _reply(conversation: Conversation, text: str) -> str | None:
    with environment_errors(FailureCause.REPLY):
        reply = conversation.next_turn(text)
    return None if reply is None else require_type(reply, str, conversation.next_turn)


def _judge(conversation: Conversation) -> Judgement:
    with environment_errors(FailureCause.REWARD):
        reward = conversation.reward()
    return check_judgement(reward, conversation.reward)
