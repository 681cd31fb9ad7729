"""Multi-turn responses in lockstep with training: one thread holds them and decodes for all.

A conversation runs as in a worker (`vcpo_rollout.generation.multi_turn`). When all of them wait for
tokens, the batch decodes until a turn ends. The environment replies at once, and the next turn
joins the batch. Nothing depends on time, so the same calls give the same tokens.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vcpo.wire.trajectory import Trajectory
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import EngineError, Generation, GenerationRequest
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.environments.environment import MultiTurnEnvironment, Prompt
from vcpo_rollout.generation.environment_pool import EnvironmentThreads
from vcpo_rollout.generation.history import History
from vcpo_rollout.generation.multi_turn import converse

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a response starts from."""

    trajectory_id: str
    prompt: Prompt
    request: GenerationRequest
    """The prompt's tokens, and the limit of the whole response."""


class LockstepEngine:
    """Samples turns with a batch that its caller advances."""

    def __init__(
        self,
        batch: DecodeBatch,
        end_token_ids: frozenset[int],
        stop_strings: StopStrings | None = None,
    ) -> None:
        """end_token_ids, stop_strings: those of the batch."""
        self._batch = batch
        self.end_token_ids = end_token_ids
        self.stop_strings = stop_strings
        self._new: list[PartialSequence] = []
        self._callers: dict[PartialSequence, asyncio.Future[Generation]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._callers)

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one turn; no turn is interrupted.

        Raises:
            EngineError: when the policy's logits are not finite.
        """
        sequence = PartialSequence(request=request)
        self._new.append(sequence)
        self._callers[sequence] = asyncio.get_running_loop().create_future()
        return await self._callers[sequence]

    def advance(self) -> None:
        """Decode until at least one turn ends; there must be one that waits."""
        self._batch.admit(self._new)
        self._new = []
        while not (ended := self._batch.step()):
            pass
        for sequence, outcome in ended.items():
            caller = self._callers.pop(sequence)
            if isinstance(outcome, EngineError):
                caller.set_exception(outcome)
            else:
                caller.set_result(outcome)


class _DirectCalls(EnvironmentThreads):
    """Runs the environment's code in the caller's thread."""

    def __init__(self) -> None: ...

    async def call(self, function: Callable[[], _Result]) -> _Result:
        return function()


async def hold_conversations(
    environment: MultiTurnEnvironment,
    openings: Sequence[Opening],
    *,
    engine: LockstepEngine,
    codec: PromptCodec,
) -> list[Trajectory]:
    """Hold conversations side by side and judge them.

    Raises:
        EngineError: when the policy's logits are not finite.
        EnvironmentFailedError: when the environment's code fails, or a reward is no finite number.
    """
    never, calls = asyncio.Event(), _DirectCalls()
    tasks = [
        asyncio.create_task(
            converse(
                opening.trajectory_id,
                environment.converse(opening.prompt),
                History(request=opening.request),
                engine=engine,
                codec=codec,
                threads=calls,
                interrupt=never,
            )
        )
        for opening in openings
    ]
    while active := sum(not task.done() for task in tasks):
        if engine.num_waiting < active:
            await asyncio.sleep(0)
        else:
            engine.advance()
    return await asyncio.gather(*tasks)
