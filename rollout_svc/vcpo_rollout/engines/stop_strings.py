"""Strings that end a response, looked for in the text of its last tokens, the resumed ones too.

vLLM looks for them itself, in the text that it samples; there a string that another worker began
ends nothing.
"""

from collections.abc import Sequence
from typing import Self

from transformers import PreTrainedTokenizerBase

from vcpo.api.algorithm import Sampling


class StopStrings:
    """The stop strings of a run.

    strings: at least one, none of them empty, without U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        # A character has at most four tokens, of a byte each; a few more at a text's beginning.
        self._num_tokens = 4 * max(map(len, strings)) + 8

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        return cls(tokenizer, sampling.stop_strings) if sampling.stop_strings else None

    def completed_by_last(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token of a response completes a stop string.

        token_ids: of the whole response, at least one; no token before the last completes one.
        """
        last = list(token_ids[-self._num_tokens :])
        text = str(self._tokenizer.decode(last, skip_special_tokens=False))
        return any(string in text for string in self.strings)
