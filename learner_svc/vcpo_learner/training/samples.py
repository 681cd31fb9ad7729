"""Responses as people read them: of the batch of a step, and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from vcpo.records.samples import (
    LEFT_OUT,
    MOST_CHARACTERS,
    SAMPLES_PER_STEP,
    Sample,
    evenly_by_reward,
    shorten,
)
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.lease import Lease


def evaluation_samples(
    step: int, answers: Mapping[int, Trajectory], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return answers to held-out prompts; answers: by index of the prompt."""
    return [
        _sample(step, index, answer, (answer.reward,), tokenizer)
        for index, answer in answers.items()
    ]


def step_samples(
    step: int, groups: Sequence[Lease], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return a few responses of a step's batch, from the worst reward to the best."""
    responses = [(group, each) for group in groups for each in group.trajectories]
    rewards = [each.reward for _, each in responses]
    return [
        _sample(
            step,
            group.prompt_index,
            each,
            tuple(one.reward for one in group.trajectories),
            tokenizer,
        )
        for group, each in evenly_by_reward(responses, rewards, SAMPLES_PER_STEP)
    ]


def _sample(
    step: int,
    prompt_index: int,
    response: Trajectory,
    group_rewards: tuple[float, ...],
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    return Sample(
        step=step,
        prompt_index=prompt_index,
        prompt=_shortened_text(response.prompt_token_ids, tokenizer),
        response=_shortened_text(response.response_token_ids, tokenizer),
        finish_reason=response.finish_reason,
        reward=response.reward,
        reward_parts=dict(response.reward_parts),
        group_rewards=group_rewards,
        prompt_tokens=len(response.prompt_token_ids),
        response_tokens=response.num_sampled_tokens,
        policy_version=response.newest_policy_version,
        worker=response.worker_id or "",
    )


def _shortened_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of tokens, without the middle if it is long; not more is decoded of it."""
    if len(token_ids) <= MOST_CHARACTERS:
        return shorten(_text(token_ids, tokenizer))
    half, whole = MOST_CHARACTERS // 2, [*token_ids]
    begin, end = _text(whole[:half], tokenizer), _text(whole[-half:], tokenizer)
    return f"{begin[:half]}{LEFT_OUT}{end[-half:]}"


def _text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(token_ids)))
