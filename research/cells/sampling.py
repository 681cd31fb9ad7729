"""Sampling in lockstep with training: the `hf` engine's decoding in the caller's thread.

The batch is the engine's, and so are its numbers. What a worker does beside it, threads, weights
over the network and leases, does not change a token. Number format, quantization and noise are
those of the run's rollout group.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from research.cells.conversations import LockstepEngine, Opening, hold_conversations
from research.cells.versions import Version
from research.study import Ages
from vcpo.algo.health.mismatch_review import MismatchClass
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import EngineError, Generation, GenerationRequest
from vcpo_rollout.engines.hf.decoding import DecodeBatch, Outcome, PartialSequence
from vcpo_rollout.engines.loading import (
    load_end_token_ids,
    load_model_skeleton,
    place_model,
    torch_dtype,
)
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.environments import Environment, Prompt, Split
from vcpo_rollout.environments.environment import MultiTurnEnvironment
from vcpo_rollout.generation.environment_pool import check_judgement
from vcpo_rollout.weights.postprocess import WeightTransform, make_postprocessing

CPU: Final = torch.device("cpu")
_NONE: Final[Mapping[int, Version]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    """A prompt of a task, and its tokens."""

    index: int
    prompt: Prompt
    token_ids: tuple[int, ...]


def relay(ages: Ages | None, versions: Sequence[Version]) -> Mapping[int, Version]:
    """Return which versions take over within a response, by number of tokens; mostly none."""
    tokens = None if ages is None else ages.tokens_per_version
    return {} if tokens is None else {at * tokens: each for at, each in enumerate(versions, 1)}


def _located(spec: VCPORunSpec, model_name: str) -> VCPORunSpec:
    model = spec.model.model_copy(update={"name": model_name})
    return spec.model_copy(update={"model": model})


class Sampler:
    """Samples responses with one policy version at a time; owns a model of its own."""

    def __init__(
        self,
        spec: VCPORunSpec,
        model_name: str,
        tokenizer: PreTrainedTokenizerBase,
        pad: int,
        device: torch.device = CPU,
    ) -> None:
        group = spec.rollouts[0]
        model = load_model_skeleton(model_name, revision=spec.model.revision)
        place_model(model, device, torch_dtype(group.number_format))
        postprocessing = make_postprocessing(
            _located(spec, model_name),
            group,
            seed=spec.seed,
            rounding=group.quantization,
            adapters=None if spec.model.lora is None else AdapterUse.MERGED,
        )
        self._transforms: Sequence[WeightTransform] = (
            () if postprocessing is None else postprocessing.transforms
        )
        self.is_inexact = spec.mismatch_class is not MismatchClass.EXACT
        """Whether its log-probabilities differ from the learner's by more than rounding noise."""
        self._end_token_ids = load_end_token_ids(
            model_name, tokenizer, revision=spec.model.revision
        )
        stop_strings = StopStrings.of(spec.sampling, tokenizer)
        self._batch = DecodeBatch(
            model,
            end_token_ids=self._end_token_ids,
            pad_token_id=pad,
            seed=spec.seed,
            stop_strings=stop_strings,
        )
        self._engine = LockstepEngine(self._batch, self._end_token_ids, stop_strings)
        environment = spec.environment
        self._codec = PromptCodec(
            tokenizer,
            environment.prompt_format,
            environment.system_prompt,
            plain_control_tokens=environment.plain_control_tokens,
        )
        self._max_new_tokens = spec.sampling.max_new_tokens

    def use(self, version: Version) -> None:
        """Load the weights of the version that samples from now on."""
        if self._batch.policy_version != version.number:
            weights: Mapping[str, Tensor] = version.weights
            for transform in self._transforms:
                weights = transform(weights, version.number)
            self._batch.swap(version.number, weights)

    def prompts(
        self, environment: Environment, split: Split, indices: Iterable[int]
    ) -> list[TaskPrompt]:
        """Return prompts of a task with their tokens."""
        prompts = {index: environment.prompt(split, index) for index in indices}
        return [
            TaskPrompt(index=index, prompt=each, token_ids=self._codec.encode(each))
            for index, each in prompts.items()
        ]

    def groups(
        self,
        environment: Environment,
        prompts: Sequence[TaskPrompt],
        *,
        samples: int,
        temperature: float,
        later: Mapping[int, Version] = _NONE,
    ) -> list[list[Trajectory]]:
        """Sample `samples` responses to each prompt and compute rewards; one group per prompt.

        later: `relay` of the version in use.

        Raises:
            EngineError: when the policy's logits are not finite.
            ValueError: for versions that take over in a task of several turns.
        """
        openings = [
            Opening(
                trajectory_id=f"{each.index}/{number}",
                prompt=each.prompt,
                request=GenerationRequest(
                    prompt_token_ids=each.token_ids,
                    temperature=temperature,
                    max_new_tokens=self._max_new_tokens,
                ),
            )
            for each in prompts
            for number in range(samples)
        ]
        if isinstance(environment, MultiTurnEnvironment):
            if later:
                raise ValueError("ages.tokensPerVersion: the task has several turns; remove it")
            trajectories = asyncio.run(
                hold_conversations(environment, openings, engine=self._engine, codec=self._codec)
            )
        else:
            trajectories = self._single_turns(environment, openings, later)
        return [
            trajectories[first : first + samples] for first in range(0, len(trajectories), samples)
        ]

    def _single_turns(
        self, environment: Environment, openings: Sequence[Opening], later: Mapping[int, Version]
    ) -> list[Trajectory]:
        generations = self._sample([opening.request for opening in openings], later)
        return [
            Trajectory(
                trajectory_id=opening.trajectory_id,
                prompt_token_ids=opening.request.prompt_token_ids,
                response_token_ids=generation.token_ids,
                rollout_logprobs=generation.logprobs,
                version_spans=generation.version_spans,
                reward=self._reward(environment, opening.prompt, generation.token_ids),
                finish_reason=generation.finish_reason,
            )
            for opening, generation in zip(openings, generations, strict=True)
        ]

    def _reward(self, environment: Environment, prompt: Prompt, token_ids: Sequence[int]) -> float:
        judgement = environment.reward(prompt, self._codec.decode(token_ids, self._end_token_ids))
        return check_judgement(judgement, environment.reward).reward

    def _sample(
        self, requests: Sequence[GenerationRequest], later: Mapping[int, Version]
    ) -> list[Generation]:
        sequences = [PartialSequence(request=request) for request in requests]
        self._batch.admit(sequences)
        outcomes: dict[PartialSequence, Outcome] = {}
        for num_tokens in count(1):
            outcomes.update(self._batch.step())
            if len(outcomes) == len(sequences):
                break
            if num_tokens in later:
                self.use(later[num_tokens])
        generations = []
        for sequence in sequences:
            outcome = outcomes[sequence]
            if isinstance(outcome, EngineError):
                raise outcome
            generations.append(outcome)
        return generations
