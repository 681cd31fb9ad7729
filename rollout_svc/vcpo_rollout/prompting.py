"""Text to tokens and back, the way the policy's tokenizer wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from vcpo.spec.workloads import PromptFormat

_ANSWER: Final = "(answer)"
"""Stands for an answer where a template is asked what it puts behind one."""


class PromptCodec:
    """Encodes what the model is told and decodes answers.

    The plain format is the text's tokens and nothing else. The chat format is the tokenizer's own
    template with one user message and the cue for the assistant's turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> None:
        has_template = bool(tokenizer.chat_template)
        if prompt_format is PromptFormat.CHAT and not has_template:
            raise ValueError(
                "spec.environment.promptFormat: 'chat' needs a tokenizer with a chat template,"
                " and this model's has none; use 'plain' or 'auto'"
            )
        self._tokenizer = tokenizer
        self._chat = has_template and prompt_format is not PromptFormat.PLAIN

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt."""
        if self._chat:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            return self._token_ids(str(rendered))
        return self._token_ids(text)

    def encode_reply(
        self, text: str, last_token_id: int, end_token_ids: frozenset[int]
    ) -> tuple[int, ...]:
        """Tokens of what the environment says between two turns of the model's.

        In the chat format that is what the template puts behind an answer: its end, a user message,
        and the cue for the next turn. The end is left out when the last token that was sampled is
        one already.
        Raises: ValueError when the template does not show answers as they are.
        """
        if not self._chat:
            return self._token_ids(text)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": text},
        ]
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        _, answer, behind = str(rendered).partition(_ANSWER)
        if not answer:
            raise ValueError(
                "spec.environment.promptFormat: the chat template changes answers, so that"
                " conversations of several turns have no exact history; use 'plain'"
            )
        token_ids = self._token_ids(behind)
        is_ended_twice = last_token_id in end_token_ids and token_ids[0] in end_token_ids
        return token_ids[1:] if is_ended_twice else token_ids

    def decode(self, token_ids: Sequence[int], end_token_ids: frozenset[int]) -> str:
        """Text of an answer, without the token that ended it."""
        kept = list(token_ids)
        if kept and kept[-1] in end_token_ids:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _token_ids(self, text: str) -> tuple[int, ...]:
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token_id) for token_id in token_ids)
