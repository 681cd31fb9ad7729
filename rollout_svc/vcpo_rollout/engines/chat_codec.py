"""Text to tokens and back, the way the policy's tokenizer wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from vcpo.spec.workloads import PromptFormat
from vcpo_rollout.environments.environment import Message, Prompt

_ANSWER: Final = "(answer)"
"""Stands for an answer where a template is asked what it puts behind one."""
_SYSTEM: Final = "(system)"
"""Stands for a system message where a template is asked whether it shows one."""


class PromptCodec:
    """Encodes what the model is told and decodes answers.

    The plain format is the text's tokens behind those that the tokenizer puts before any text, such
    as BOS. The chat format is the tokenizer's own template, which writes them itself, with the
    prompt's messages and the cue for the assistant's turn.

    system_prompt: Put before each prompt that has no system message of its own; chat only.

    Raises:
        ValueError: naming the field, when the tokenizer has no template and one is needed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        system_prompt: str | None = None,
    ) -> None:
        has_template = bool(tokenizer.chat_template)
        if prompt_format is PromptFormat.CHAT and not has_template:
            raise ValueError(
                "spec.environment.promptFormat: 'chat' needs a tokenizer with a chat template,"
                " and this model's has none; use 'plain' or 'auto'"
            )
        self._tokenizer = tokenizer
        self._chat = has_template and prompt_format is not PromptFormat.PLAIN
        if system_prompt is not None and not self._chat:
            raise ValueError(
                "spec.environment.systemPrompt: needs the chat format, and this run's prompts are"
                " plain text; write it into the environment's prompts, or use a model whose"
                " tokenizer has a chat template"
            )
        self._system_prompt = system_prompt
        self._has_system_role = self._chat and self._shows_system_messages()
        self._beginning = () if self._chat else self._tokens_before_any_text()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens of a prompt.

        Raises: jinja2.TemplateError when the chat template refuses the messages.
        """
        if not self._chat:
            return (*self._beginning, *self._token_ids(prompt.text))
        messages = prompt.messages or (Message(role="user", content=prompt.text),)
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = (Message(role="system", content=self._system_prompt), *messages)
        return self._token_ids(self._rendered(self._with_known_roles(messages)))

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
        messages = (
            Message(role="user", content="?"),
            Message(role="assistant", content=_ANSWER),
            Message(role="user", content=text),
        )
        _, answer, behind = self._rendered(messages).partition(_ANSWER)
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

    def _with_known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages for the template; where it knows no system role, the user's begins with them."""
        if self._has_system_role:
            return messages
        system = [message["content"] for message in messages if message["role"] == "system"]
        first, *rest = (message for message in messages if message["role"] != "system")
        content = "\n\n".join([*system, first["content"]])
        return [Message(role=first["role"], content=content), *rest]

    def _shows_system_messages(self) -> bool:
        """Whether the template has a place for a system message: some refuse it, some drop it."""
        asked = (Message(role="system", content=_SYSTEM), Message(role="user", content="?"))
        try:
            return _SYSTEM in self._rendered(asked)
        except TemplateError:
            return False

    def _rendered(self, messages: Sequence[Message]) -> str:
        plain = [{"role": one["role"], "content": one["content"]} for one in messages]
        rendered = self._tokenizer.apply_chat_template(
            plain, add_generation_prompt=True, tokenize=False
        )
        return str(rendered)

    def _tokens_before_any_text(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text; what it puts behind one would end the prompt."""
        text = "a"
        bare = self._token_ids(text)
        whole = tuple(int(each) for each in self._tokenizer(text)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return ()

    def _token_ids(self, text: str) -> tuple[int, ...]:
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token_id) for token_id in token_ids)
