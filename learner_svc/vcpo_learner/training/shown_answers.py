"""What records show of responses, as text: of an evaluation, and of the batch of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from vcpo.records.journal import ShownAnswer
from vcpo.records.samples import (
    LEFT_OUT,
    MOST_CHARACTERS,
    SAMPLES_PER_STEP,
    Sample,
    evenly_by_reward,
    shortened,
)
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.lease import Lease

_MAX_TOKENS: Final = 128
"""Tokens of a prompt, from its end, and of a response, from its start, in an evaluation."""


def shown_answers(
    responses: Iterable[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> tuple[ShownAnswer, ...]:
    """Return prompts and responses as text, special tokens included; long ones are cut."""
    return tuple(
        ShownAnswer(
            prompt=_text([*response.prompt_token_ids][-_MAX_TOKENS:], tokenizer),
            response=_text([*response.response_token_ids][:_MAX_TOKENS], tokenizer),
            reward=response.reward,
        )
        for response in responses
    )


def step_samples(
    step: int, groups: Sequence[Lease], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return a few responses of a step's batch, from the worst reward to the best."""
    responses = [(group, each) for group in groups for each in group.trajectories]
    rewards = [each.reward for _, each in responses]
    return [
        Sample(
            step=step,
            prompt_index=group.prompt_index,
            prompt=_shortened_text(each.prompt_token_ids, tokenizer),
            response=_shortened_text(each.response_token_ids, tokenizer),
            finish_reason=each.finish_reason,
            reward=each.reward,
            reward_parts=dict(each.reward_parts),
            group_rewards=tuple(one.reward for one in group.trajectories),
            prompt_tokens=len(each.prompt_token_ids),
            response_tokens=each.num_sampled_tokens,
            policy_version=each.newest_policy_version,
            worker=each.worker_id or "",
        )
        for group, each in evenly_by_reward(responses, rewards, SAMPLES_PER_STEP)
    ]


def _shortened_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of tokens, without the middle if it is long; not more is decoded of it."""
    if len(token_ids) <= MOST_CHARACTERS:
        return shortened(_text(token_ids, tokenizer))
    half, whole = MOST_CHARACTERS // 2, [*token_ids]
    begin, end = _text(whole[:half], tokenizer), _text(whole[-half:], tokenizer)
    return f"{begin[:half]}{LEFT_OUT}{end[-half:]}"


def _text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(token_ids)))
