"""Encodes prompts and replies, and decodes responses, with the policy's tokenizer."""

import contextlib
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from types import MappingProxyType
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from vcpo.api.workloads import PromptFormat, template_complaints
from vcpo_rollout.engines.control_tokens import ControlTokens
from vcpo_rollout.environments.environment import Message, Prompt

_RESPONSE: Final = "(answer)"
"""Placeholder for a response, to find out what a template writes after one."""
_ANCHOR: Final = "\n"
"""Stands before a plain reply while it is encoded, where a tokenizer puts a space before texts; a
period where it drops line ends."""
_TEXT: Final = "(text)"
"""Placeholder for a message, to find out whether a template shows it."""


class PromptCodec:
    """Encodes prompts and replies for the model, and decodes its responses.

    The plain format is the text's tokens after those that the tokenizer puts before every text,
    such as BOS. The chat format is the tokenizer's chat template, which writes these tokens itself,
    applied to the prompt's messages and the cue for the assistant's turn.

    The text of prompts and replies is text: only the template places control tokens.

    system_prompt: Put before each prompt that has no system message of its own; chat format only.
    template_arguments: Arguments of the chat template, beside the messages.
    plain_control_tokens: Whether what spells a control token becomes one in the plain format.
    today: What a template takes for today's date as long as this codec lives; None: now's, in UTC.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        system_prompt: str | None = None,
        *,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        plain_control_tokens: bool = False,
        today: date | None = None,
    ) -> None:
        has_template = bool(tokenizer.chat_template)
        if not has_template:
            for field, message in template_complaints(
                prompt_format, system_prompt, template_arguments
            ):
                raise ValueError(f"spec.environment.{field}: {message}")
        self._tokenizer = tokenizer
        self._chat = has_template and prompt_format is not PromptFormat.PLAIN
        self._system_prompt = system_prompt
        self._template_arguments = template_arguments
        self._check_template_arguments()
        self._control_tokens = ControlTokens(tokenizer)
        self._reads_control_tokens = plain_control_tokens and not self._chat
        self._now = datetime.combine(today or datetime.now(UTC).date(), time.min)
        user, system = Message(role="user", content=_TEXT), Message(role="system", content=_TEXT)
        self._wants_parts = False
        if self._chat and not self._shows(user):  # as those of some models with images
            self._wants_parts = True
            self._wants_parts = self._shows(user)
        question = Message(role="user", content="?")
        self._has_system_role = self._chat and self._shows(system, question)
        self._prefix = () if self._chat else self._prefix_tokens()
        self.turn_end_ids = self._turn_end_ids()
        """Control token that the template writes after a turn of the model; empty if none."""

    def encode(self, prompt: Prompt, *, max_tokens: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a prompt.

        max_tokens: The longest text loses its beginning until the prompt has no more of them, and
            what the template writes stays. A prompt of which that would leave too much stays whole.
        """
        messages = self._shown_messages(prompt)
        token_ids = self._encode_messages(messages)
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        longest = max(range(len(messages)), key=lambda number: len(messages[number]["content"]))
        text = messages[longest]["content"]

        def shorten(num_lost: int) -> tuple[int, ...]:
            message = Message(role=messages[longest]["role"], content=text[num_lost:])
            return self._encode_messages([*messages[:longest], message, *messages[longest + 1 :]])

        num_lost = bisect_left(
            range(len(text) + 1), True, key=lambda each: len(shorten(each)) <= max_tokens
        )
        return shorten(num_lost) if num_lost <= len(text) else token_ids

    def encode_reply(
        self, text: str, last_token_id: int, end_token_ids: frozenset[int]
    ) -> tuple[int, ...]:
        """Return the tokens of an environment's reply between two turns of the model.

        In the chat format the template writes them after a response: its end token, a user message,
        and the cue for the next turn. The end token is left out if the model sampled one itself.
        """
        if not self._chat:
            # Where a tokenizer puts a space before every text, a reply in the middle gets none.
            encode = self._plain_token_ids
            start = _ANCHOR if _ANCHOR in self.decode(encode(_ANCHOR), frozenset()) else "."
            anchor, anchored = encode(start), encode(start + text)
            puts_space = encode(f"{start}a") != anchor + encode("a")
            is_kept = puts_space and anchored[: len(anchor)] == anchor
            return anchored[len(anchor) :] if is_kept else encode(text)

        def render(texts: Sequence[str]) -> str:
            (reply,) = texts
            messages = (
                Message(role="user", content="?"),
                Message(role="assistant", content=_RESPONSE),
                Message(role="user", content=reply),
            )
            _, response, written = self._render(messages).partition(_RESPONSE)
            if not response:
                raise ValueError(
                    "spec.environment.promptFormat: the chat template changes the text of"
                    " responses, so a multi-turn conversation has no exact token history; use"
                    " 'plain'"
                )
            return written

        token_ids = self._control_tokens.encode([text], render)
        is_ended_twice = last_token_id in end_token_ids and token_ids[0] in end_token_ids
        return token_ids[1:] if is_ended_twice else token_ids

    def decode(self, token_ids: Sequence[int], end_token_ids: frozenset[int]) -> str:
        kept = list(token_ids)
        if kept and kept[-1] in end_token_ids:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _shown_messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """Return the messages of a prompt that the template gets; a plain one is the only one."""
        if not self._chat:
            return (Message(role="user", content=prompt.text),)
        messages = prompt.messages or (Message(role="user", content=prompt.text),)
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = (Message(role="system", content=self._system_prompt), *messages)
        if self._has_system_role:
            return messages
        # The template has no system role: the user's message begins with the system messages.
        system = [message["content"] for message in messages if message["role"] == "system"]
        first, *rest = (message for message in messages if message["role"] != "system")
        content = "\n\n".join([*system, first["content"]])
        return (Message(role=first["role"], content=content), *rest)

    def _encode_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if not self._chat:
            return (*self._prefix, *self._plain_token_ids(messages[0]["content"]))

        def render(texts: Sequence[str]) -> str:
            pairs = zip(messages, texts, strict=True)
            return self._render([Message(role=one["role"], content=text) for one, text in pairs])

        return self._control_tokens.encode([each["content"] for each in messages], render)

    def _plain_token_ids(self, text: str) -> tuple[int, ...]:
        if self._reads_control_tokens:
            return self._control_tokens.spelled_token_ids(text)
        return self._control_tokens.encode([text], "".join)

    def _shows(self, *messages: Message) -> bool:
        """Whether the template shows `_TEXT` of these messages; some refuse one, some drop it."""
        try:
            return _TEXT in self._render(messages)
        except TemplateSyntaxError as error:
            raise ValueError(
                "spec.model.name: the chat template of its tokenizer is no Jinja template (line"
                f" {error.lineno}: {error.message}); correct it, or set"
                " spec.environment.promptFormat to 'plain'"
            ) from error
        except (TemplateError, TypeError):
            return False

    def _check_template_arguments(self) -> None:
        """Check that the template reads each of its arguments; any other has no effect."""
        template = str(self._tokenizer.chat_template) if self._chat else ""
        for name, value in self._template_arguments.items():
            if re.search(rf"\b{re.escape(name)}\b", template) is None:
                raise ValueError(
                    f"spec.environment.templateArguments.{name}: {value!r} has no effect, because"
                    f" {'the chat template' if self._chat else 'plain text'} does not read"
                    f" {name!r}; correct the name, or remove it"
                )

    def _render(self, messages: Sequence[Message]) -> str:
        def shown(text: str) -> Any:
            return [{"type": "text", "text": text}] if self._wants_parts else text

        text = self._tokenizer.apply_chat_template(
            [{"role": one["role"], "content": shown(one["content"])} for one in messages],
            add_generation_prompt=True,
            tokenize=False,
            **self._template_arguments,
            strftime_now=self._now.strftime,  # in place of the template's own clock
        )
        return str(text)

    def _turn_end_ids(self) -> frozenset[int]:
        first: tuple[int, ...] = ()
        if self._chat:
            with contextlib.suppress(ValueError, TemplateError):  # a template of single turns
                first = self.encode_reply("?", -1, frozenset())[:1]
        return frozenset(filter(self._control_tokens.is_control, first))

    def _prefix_tokens(self) -> tuple[int, ...]:
        """Return the tokens before a text; those after it would end the prompt and are dropped."""
        text = "a"
        bare = self._control_tokens.spelled_token_ids(text)
        whole = tuple(int(each) for each in self._tokenizer(text)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return ()
