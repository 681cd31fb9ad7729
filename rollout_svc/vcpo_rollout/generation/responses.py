"""Generates and judges the responses of a lease, in a single turn or in several."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_from_message,
    prompt_checksum,
    shown_text,
)
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import (
    Engine,
    EngineError,
    Generation,
    GenerationRequest,
    InvalidRequestError,
)
from vcpo_rollout.engines.seeds import response_seed
from vcpo_rollout.environments.environment import (
    Conversation,
    Environment,
    MultiTurnEnvironment,
    Prompt,
    Split,
)
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import (
    EnvironmentThreads,
    Judgement,
    check_judgement,
    environment_errors,
    require_type,
)
from vcpo_rollout.generation.group_sampling import (
    GroupInterruptedError,
    gather_complete,
    sample_group,
)
from vcpo_rollout.generation.history import Endings, History
from vcpo_rollout.generation.multi_turn import converse, resume

_LOGGER = logging.getLogger(__name__)
_MAX_ENGINE_FAILURES = 8
"""Number of leases in a row that fail in the engine, after which the engine is at fault and no
prompt."""
_SPLITS = {work_pb2.SPLIT_TRAIN: Split.TRAIN, work_pb2.SPLIT_EVALUATION: Split.EVALUATION}


@dataclass(slots=True, kw_only=True, eq=False)
class ResponseGenerator:
    """Generates responses with one engine and one environment, for many leases at a time.

    Owner: the worker's event loop.
    """

    engine: Engine
    environment: Environment
    codec: PromptCodec
    gauges: RolloutGauges
    threads: EnvironmentThreads
    truncates_prompts: bool = False
    """Whether a prompt that does not fit into the context loses text."""
    _engine_failures: list[EngineError] = field(default_factory=list, init=False)
    """Errors of the leases that failed since one last succeeded."""

    def check_engine(self) -> None:
        """Check that the engine still generates.

        Raises: EngineError, the last one, after too many in a row.
        """
        if len(self._engine_failures) >= _MAX_ENGINE_FAILURES:
            raise self._engine_failures[-1]

    async def generate(self, lease: work_pb2.Lease, interrupt: asyncio.Event) -> list[Trajectory]:
        """Generate and judge the responses of a lease.

        interrupt: once it is set, running sequences stop at their next decoding step.

        Raises:
            GroupInterruptedError: with the tokens so far, when `interrupt` was set.
            EngineError: when the engine could not generate a response, or refuses the request.
            EnvironmentFailedError: when the environment's code fails, or its reward is no number.
        """
        prompt, prompt_token_ids = await self.threads.call(partial(self._make_prompt, lease))
        begun = [
            partial_from_message(message, path=f"begun[{index}]")
            for index, message in enumerate(lease.begun)
        ]
        starts = {each.number: each for each in begun}
        requests = {
            number: GenerationRequest(
                prompt_token_ids=prompt_token_ids,
                temperature=lease.sampling.temperature,
                max_new_tokens=lease.sampling.max_new_tokens,
                partial_response=starts.get(number),
                seed=response_seed(lease, number),
            )
            for number in lease.response_numbers or range(lease.num_trajectories)
        }
        environment = self.environment
        try:
            if isinstance(environment, MultiTurnEnvironment):
                made = await self._generate_turns(lease, environment, prompt, requests, interrupt)
            else:
                made = await self._generate_single_turn(lease, prompt, requests, interrupt)
        except GroupInterruptedError as error:
            prompt_xxh3 = prompt_checksum(prompt_token_ids)
            raise GroupInterruptedError(
                [replace(one, prompt_xxh3=prompt_xxh3) for one in error.partial_responses]
            ) from error
        asked = prompt.messages[-1]["content"] if prompt.messages else prompt.text
        question, answer = shown_text(asked), shown_text(prompt.answer)
        return [replace(each, question=question, answer=answer) for each in made]

    async def _generate_single_turn(
        self,
        lease: work_pb2.Lease,
        prompt: Prompt,
        requests: Mapping[int, GenerationRequest],
        interrupt: asyncio.Event,
    ) -> list[Trajectory]:
        started_s = time.monotonic()
        with self._count_engine_failures():
            generations = await sample_group(self.engine, requests, interrupt=interrupt)
        self.gauges.metrics.generation_s.observe(time.monotonic() - started_s)
        judgements = await asyncio.gather(
            *(
                self.threads.call(partial(self._judge, prompt, generation))
                for generation in generations.values()
            )
        )
        return [
            Trajectory(
                trajectory_id=f"{lease.lease_id}/{number}",
                prompt_token_ids=requests[number].prompt_token_ids,
                response_token_ids=generation.token_ids,
                rollout_logprobs=generation.logprobs,
                version_spans=generation.version_spans,
                reward=judgement.reward,
                reward_parts=judgement.parts,
                finish_reason=generation.finish_reason,
                expert_routes=generation.expert_routes,
            )
            for (number, generation), judgement in zip(generations.items(), judgements, strict=True)
        ]

    async def _generate_turns(
        self,
        lease: work_pb2.Lease,
        environment: MultiTurnEnvironment,
        prompt: Prompt,
        requests: Mapping[int, GenerationRequest],
        interrupt: asyncio.Event,
    ) -> list[Trajectory]:
        started_s = time.monotonic()
        with self._count_engine_failures():
            trajectories = await gather_complete(
                {
                    number: partial(
                        self._hold_conversation, lease, environment, prompt, request, interrupt
                    )
                    for number, request in requests.items()
                },
                to_partial_response=_to_partial_response,
            )
        self.gauges.metrics.generation_s.observe(time.monotonic() - started_s)
        return [
            replace(one, trajectory_id=f"{lease.lease_id}/{number}")
            for number, one in trajectories.items()
        ]

    async def _hold_conversation(
        self,
        lease: work_pb2.Lease,
        environment: MultiTurnEnvironment,
        prompt: Prompt,
        request: GenerationRequest,
        interrupt: asyncio.Event,
    ) -> Trajectory:
        """Hold one conversation; resume it if the environment repeats its replies."""
        partial_response = request.partial_response
        request = replace(request, partial_response=None)
        engine, codec, threads = self.engine, self.codec, self.threads

        def begin() -> Conversation:
            with environment_errors(FailureCause.PROMPT):
                return environment.converse(prompt)

        resumed = None
        if partial_response is not None:
            resumed = await resume(
                begin,
                request,
                partial_response,
                codec=codec,
                endings=Endings.of(engine),
                threads=threads,
            )
            if resumed is None:
                _LOGGER.warning(
                    "prompt %d: a response is restarted and loses %d tokens, because its "
                    "environment gives other replies to the same turns",
                    lease.prompt_index,
                    len(partial_response.token_ids),
                )
        conversation, history = resumed or (await threads.call(begin), History(request=request))
        return await converse(
            lease.lease_id,
            conversation,
            history,
            engine=engine,
            codec=codec,
            threads=threads,
            interrupt=interrupt,
        )

    @contextlib.contextmanager
    def _count_engine_failures(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError:
            raise  # it says nothing about the engine
        except EngineError as error:
            self._engine_failures.append(error)
            raise
        self._engine_failures.clear()

    def _make_prompt(self, lease: work_pb2.Lease) -> tuple[Prompt, tuple[int, ...]]:
        with environment_errors(FailureCause.PROMPT):
            value = self.environment.prompt(_SPLITS[lease.split], lease.prompt_index)
            prompt = require_type(value, Prompt, self.environment.prompt)
            token_ids = self.codec.encode(prompt)
            max_tokens = self._max_prompt_tokens(lease)
            if max_tokens is None or len(token_ids) <= max_tokens:
                return prompt, token_ids
            return prompt, self.codec.encode(prompt, max_tokens=max_tokens)

    def _max_prompt_tokens(self, lease: work_pb2.Lease) -> int | None:
        context_tokens = self.engine.context_tokens if self.truncates_prompts else None
        return None if context_tokens is None else context_tokens - lease.sampling.max_new_tokens

    def _judge(self, prompt: Prompt, generation: Generation) -> Judgement:
        reward = self.environment.reward
        with environment_errors(FailureCause.REWARD):
            text = self.codec.decode(generation.token_ids, self.engine.end_token_ids)
            return check_judgement(reward(prompt, text), reward)


def _to_partial_response(trajectory: Trajectory) -> PartialResponse:
    return PartialResponse(
        token_ids=tuple(trajectory.response_token_ids),
        logprobs=tuple(trajectory.rollout_logprobs),
        version_spans=trajectory.version_spans,
        finish_reason=trajectory.finish_reason,
        inserted_spans=trajectory.inserted_spans,
    )
