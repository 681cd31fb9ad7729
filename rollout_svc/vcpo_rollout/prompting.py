"""Text to tokens and back, the way the policy's tokenizer wants it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from vcpo.spec.workloads import PromptFormat


class PromptCodec:
    """Encodes one user turn and decodes answers.

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
            token_ids = self._tokenizer(str(rendered), add_special_tokens=False)["input_ids"]
        else:
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token_id) for token_id in token_ids)

    def decode(self, token_ids: Sequence[int], end_token_ids: frozenset[int]) -> str:
        """Text of an answer, without the token that ended it."""
        kept = list(token_ids)
        if kept and kept[-1] in end_token_ids:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))
