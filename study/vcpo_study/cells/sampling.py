"""Sampling in lockstep with training: the `hf` engine's decoding in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from vcpo.spec import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import EngineError, Generation, GenerationRequest
from vcpo_rollout.engines.hf.decoding import DecodeBatch, Outcome, PartialSequence
from vcpo_rollout.engines.limits import check_decodable
from vcpo_rollout.engines.loading import load_end_token_ids, load_model_skeleton, place_model
from vcpo_rollout.environments import Environment, Split
from vcpo_study.cells.versions import Version


class Sampler:
    """Samples responses with one policy version at a time; owns a model of its own."""

    def __init__(
        self, spec: VCPORunSpec, model_name: str, tokenizer: PreTrainedTokenizerBase, pad: int
    ) -> None:
        model = load_model_skeleton(model_name, revision=spec.model.revision)
        check_decodable(model)
        place_model(model, torch.device("cpu"), torch.float32)
        self._end_token_ids = load_end_token_ids(
            model_name, tokenizer, revision=spec.model.revision
        )
        self._batch = DecodeBatch(
            model, end_token_ids=self._end_token_ids, pad_token_id=pad, seed=spec.seed
        )
        environment = spec.environment
        self._codec = PromptCodec(tokenizer, environment.prompt_format, environment.system_prompt)
        self._max_new_tokens = spec.sampling.max_new_tokens

    def use(self, version: Version) -> None:
        """Load the weights of the version that samples from now on."""
        if self._batch.policy_version != version.number:
            self._batch.swap(version.number, version.weights)

    def groups(
        self,
        environment: Environment,
        split: Split,
        indices: Sequence[int],
        *,
        samples: int,
        temperature: float,
    ) -> list[list[Trajectory]]:
        """Sample `samples` responses to each prompt and compute rewards; one group per prompt.

        Raises:
            EngineError: when the policy's logits are not finite.
        """
        prompts = [environment.prompt(split, index) for index in indices]
        requests = [
            GenerationRequest(
                prompt_token_ids=self._codec.encode(prompt),
                temperature=temperature,
                max_new_tokens=self._max_new_tokens,
            )
            for prompt in prompts
        ]
        generations = iter(self._sample([each for each in requests for _ in range(samples)]))
        return [
            [
                Trajectory(
                    trajectory_id=f"{index}/{number}",
                    prompt_token_ids=request.prompt_token_ids,
                    response_token_ids=generation.token_ids,
                    rollout_logprobs=generation.logprobs,
                    version_spans=generation.version_spans,
                    reward=environment.reward(
                        prompt, self._codec.decode(generation.token_ids, self._end_token_ids)
                    ),
                    finish_reason=generation.finish_reason,
                )
                for number, generation in enumerate(islice(generations, samples))
            ]
            for index, prompt, request in zip(indices, prompts, requests, strict=True)
        ]

    def _sample(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        sequences = [PartialSequence(request=request) for request in requests]
        self._batch.admit(sequences)
        outcomes: dict[PartialSequence, Outcome] = {}
        while len(outcomes) < len(sequences):
            outcomes.update(self._batch.step())
        generations = []
        for sequence in sequences:
            outcome = outcomes[sequence]
            if isinstance(outcome, EngineError):
                raise outcome
            generations.append(outcome)
        return generations
