"""What a record of an evaluation shows of its responses, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from vcpo.records.journal import ShownAnswer
from vcpo.wire.trajectory import Trajectory

_MAX_TOKENS: Final = 128
"""Tokens of a prompt, from its end, and of a response, from its start."""


def shown_answers(
    responses: Iterable[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> tuple[ShownAnswer, ...]:
    """Return prompts and responses as text, special tokens included; long ones are cut."""

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return tuple(
        ShownAnswer(
            prompt=text([*response.prompt_token_ids][-_MAX_TOKENS:]),
            response=text([*response.response_token_ids][:_MAX_TOKENS]),
            reward=response.reward,
        )
        for response in responses
    )
