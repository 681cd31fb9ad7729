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
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vcpo.wire.trajectory import FinishReason, TokenSpan, Trajectory, VersionSpan
from vcpo_rollout.engines.engine import Engine, Generation, GenerationRequest
from vcpo_rollout.environments.environment import Conversation
from vcpo_rollout.prompting import PromptCodec


class EnvironmentFailedError(RuntimeError):
    """The environment's own code failed; the prompt is reported as failed, with the cause."""


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Around calls of an environment, which may raise anything.

    Raises: EnvironmentFailedError naming `what` failed and how.
    """
    try:
        yield
    except Exception as error:  # it is the user's code
        raise EnvironmentFailedError(f"{what}: {type(error).__name__}: {error}") from error


@dataclass(slots=True, kw_only=True)
class _History:
    """One response as it comes about."""

    request: GenerationRequest
    """The prompt, and room for the whole response: inserted tokens count, since they take up the
    model's context and the learner's memory as sampled ones do."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    inserted_spans: list[TokenSpan] = field(default_factory=list)

    def next_request(self) -> GenerationRequest:
        """Ask for the next turn, after everything before it."""
        return replace(
            self.request,
            prompt_token_ids=(*self.request.prompt_token_ids, *self.token_ids),
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
        )

    def sampled(self, generation: Generation) -> None:
        """Append a turn of the model's."""
        self.token_ids.extend(generation.token_ids)
        self.logprobs.extend(generation.logprobs)
        self.version_spans.extend(generation.version_spans)

    def insert(self, token_ids: Sequence[int]) -> bool:
        """Append what the environment says, if that leaves room for another turn."""
        if len(self.token_ids) + len(token_ids) >= self.request.max_new_tokens:
            return False
        if token_ids:
            span = TokenSpan(start=len(self.token_ids), num_tokens=len(token_ids))
            self.inserted_spans.append(span)
            self.token_ids.extend(token_ids)
        return True


async def converse(
    trajectory_id: str,
    conversation: Conversation,
    request: GenerationRequest,
    *,
    engine: Engine,
    codec: PromptCodec,
    cut: asyncio.Event,
) -> Trajectory:
    """Hold one conversation to its end and have it judged.

    request: the prompt; its `max_new_tokens` bounds the whole response, replies included.
    cut: when it is set, the conversation ends with the turn under way.

    Raises:
        GenerationCutError: when it was cut.
        EngineError: when a turn could not be sampled.
        EnvironmentFailedError: when the environment's code fails, or its reward is no number.
    """
    history = _History(request=request)
    while True:
        generation = await engine.generate(history.next_request(), cut=cut)
        history.sampled(generation)
        text = codec.decode(generation.token_ids, engine.end_token_ids)
        # The environment may be slow, and is somebody else's code: it must not hold up the loop.
        reply = await asyncio.to_thread(_reply, conversation, text)
        finish_reason = generation.finish_reason
        if reply is None or finish_reason is FinishReason.LENGTH:
            break
        with foreign_code("reply"):
            said = codec.encode_reply(reply, generation.token_ids[-1], engine.end_token_ids)
        if not history.insert(said):
            finish_reason = FinishReason.LENGTH
            break
    return Trajectory(
        trajectory_id=trajectory_id,
        prompt_token_ids=request.prompt_token_ids,
        response_token_ids=tuple(history.token_ids),
        rollout_logprobs=tuple(history.logprobs),
        version_spans=tuple(history.version_spans),
        reward=await asyncio.to_thread(_reward, conversation),
        finish_reason=finish_reason,
        inserted_spans=tuple(history.inserted_spans),
    )


def _reply(conversation: Conversation, text: str) -> str | None:
    with foreign_code("reply"):
        return conversation.next_turn(text)


def _reward(conversation: Conversation) -> float:
    with foreign_code("reward"):
        reward = float(conversation.reward())
    if not math.isfinite(reward):
        raise EnvironmentFailedError(f"reward: must be a finite number, got {reward}")
    return reward
