"""Strings that end a response, looked for after each token.

A response ends at the first token after which its text contains one of them. The text is that of
all of its tokens, the resumed ones too, decoded together, as the environment gets it. A string may
therefore begin in any token and end in the middle of another.

To decode the whole text after each token would cost the square of its length. So a token is asked
first whether what it writes may end a string, which is remembered for each token of the vocabulary.
Only then the last tokens are decoded, and the whole text once if these have a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

from transformers import PreTrainedTokenizerBase

from vcpo.api.algorithm import Sampling

_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
"""Character that a decoder writes for bytes that are no character, or a part of one."""
_EDGE: Final = 16
"""Characters at the beginning of a text of last tokens that the whole text may not have: decoders
drop a space there, or join others."""


class StopStrings:
    """The stop strings of a run. Owner: the thread or event loop in which its engine samples.

    strings: at least one, none of them empty, without U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._last_characters = frozenset(string[-1] for string in strings)
        self._longest = max(map(len, strings))
        self._may_end: dict[int, bool] = {}
        """Whether a token may end a string, by token."""

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """Return those of a run; None if only end tokens end its responses."""
        return cls(tokenizer, sampling.stop_strings) if sampling.stop_strings else None

    def completed_by_last(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token of a response completes a stop string.

        token_ids: of the whole response, at least one; no token before the last completes one.
        """
        last = token_ids[-1]
        may_end = self._may_end.get(last)
        if may_end is None:
            may_end = self._may_end[last] = self._may_end_in(last)
        if not may_end:
            return False
        tail = self._tail(token_ids)
        return self._is_in(tail) and self._is_in(self._decode(token_ids))

    def _may_end_in(self, token_id: int) -> bool:
        """Return whether a token writes the last character of a string, or a part of one."""
        if self._tokenizer.clean_up_tokenization_spaces:
            return True  # such a decoder moves characters together that other tokens wrote
        # Twice, because some decoders drop the space with which a text begins.
        text = self._decode([token_id, token_id])
        return _BROKEN in text or not self._last_characters.isdisjoint(text)

    def _tail(self, token_ids: Sequence[int]) -> str:
        """Return the text of enough last tokens for every string that may end in the last one."""
        needed = _EDGE + self._longest + len(self._decode(token_ids[-1:]))
        size = _EDGE + self._longest
        while size < len(token_ids):
            text = self._decode(token_ids[-size:])
            # The first of these tokens may begin in the middle of a character.
            if len(text.lstrip(_BROKEN)) >= needed:
                return text
            size *= 2
        return self._decode(token_ids)

    def _is_in(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
