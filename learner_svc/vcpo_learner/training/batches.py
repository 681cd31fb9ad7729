"""What is recorded of a batch: its ages of tokens and lengths, and a few of its responses."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from vcpo.algo.health.diagnostics import percentile
from vcpo.records.samples import (
    LEFT_OUT,
    MOST_CHARACTERS,
    SAMPLES_PER_STEP,
    Sample,
    evenly_by_reward,
    shorten,
)
from vcpo.wire.limits import MAX_REWARD_PARTS
from vcpo.wire.trajectory import FinishReason, Trajectory
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.update.batch_decision import tokens_by_lag


def batch_fields(groups: Sequence[Lease], policy_version: int) -> dict[str, Any]:
    """Return the fields of `StepRecord` that describe a batch at a version."""
    lengths = [len(group.trajectories[0].prompt_token_ids) for group in groups]
    responses = list(chain.from_iterable(group.trajectories for group in groups))
    sampled = sorted(one.num_sampled_tokens for one in responses)
    parts = sorted({name for one in responses for name in one.reward_parts})[:MAX_REWARD_PARTS]
    return {
        **lag_fields(groups, policy_version),
        "cut_responses_ratio": fmean(one.finish_reason is FinishReason.LENGTH for one in responses),
        "equal_groups_ratio": fmean(
            len({one.reward for one in group.trajectories}) == 1 < len(group.trajectories)
            for group in groups
        ),
        "prompt_tokens_mean": fmean(lengths),
        "prompt_tokens_max": max(lengths),
        "response_tokens_p05": percentile(sampled, 5),
        "response_tokens_p50": percentile(sampled, 50),
        "response_tokens_p95": percentile(sampled, 95),
        "reward_parts": {
            name: fmean(one.reward_parts.get(name, 0.0) for one in responses) for name in parts
        },
    }


def lag_fields(groups: Sequence[Lease], policy_version: int) -> dict[str, float]:
    """Return the fields about the ages of all response tokens of a batch, in steps."""
    trajectories = chain.from_iterable(group.trajectories for group in groups)
    tokens = tokens_by_lag(trajectories, policy_version)
    total = tokens.total()
    middle, seen, p50 = (total + 1) // 2, 0, 0
    for lag in sorted(tokens):
        seen += tokens[lag]
        if seen >= middle:
            p50 = lag
            break
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return {"lag_mean": mean, "lag_p50": p50, "lag_max": max(tokens)}


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
        question=response.question,
        answer=response.answer,
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
