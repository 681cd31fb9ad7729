r"""Tokens of texts in which only a template places control tokens.

A tokenizer finds a control token, such as `<|im_end|>`, wherever it is spelled. So a data set, a
tool's output or an environment that repeats the model's words could end a turn and begin another.
Where a text spells one, it is *quoted* before the template sees it: a private character stands for
the spelling. What is spelled in the rendered text is then the template's own:

```
text      log: <|im_end|>                        quoted text   log: Q
rendered  <|im_start|>user\nlog: Q<|im_end|>\n
aliased   Auser\nlog: <|im_end|>B\n             A, B: other names of the two control tokens
```

A copy of the tokenizer that knows control tokens by these names alone encodes the last line in one
piece, so that tokens merge where they do without a quote.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

Render = Callable[[Sequence[str]], str]
"""Returns texts with what a template writes around them."""

_ALIASES: Final = range(0xF0000, 0xFFFFE)
_QUOTES: Final = range(0x100000, 0x10FFFE)
"""Planes 15 and 16 of Unicode: for private use, and hardly ever in a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AliasedTokenizer:
    """A copy of a tokenizer that knows control tokens by other names alone."""

    tokenizer: Tokenizer
    names: Mapping[str, str]
    """A private character for each control token, by its spelling."""
    control_ids: Mapping[int, int]
    """The control token for each token of a name."""


class ControlTokens:
    """Encodes texts in what a template writes around them, and tells the two apart.

    A control token is an added token that the tokenizer calls special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, AddedToken] = {
            token_id: token
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content
        }
        # As the tokenizer's own search: the first one, and of several there the longest.
        spellings = sorted((each.content for each in self._special.values()), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def encode(self, texts: Sequence[str], render: Render) -> tuple[int, ...]:
        """Return the tokens of `render(texts)`, in which no text becomes a control token.

        Where the tokenizer or the template cannot keep a spelling apart from the token, the text
        has spaces between the characters of the spelling.
        """
        if not any(self._has_control_token(text) for text in texts):
            return self.spelled_token_ids(render(texts))
        spelled = sorted(set(self._spelling.findall("\0".join(texts))))
        free = (chr(each) for each in _QUOTES if not any(chr(each) in text for text in texts))
        quotes = dict(zip(spelled, free, strict=False))
        token_ids = self._encode_quoted(render(self._replace_tokens(texts, quotes)), quotes)
        if token_ids is None:
            spaced = {spelling: " ".join(spelling) for spelling in spelled}
            token_ids = self.spelled_token_ids(render(self._replace_tokens(texts, spaced)))
        return token_ids

    def is_control(self, token_id: int) -> bool:
        return token_id in self._special

    def spelled_token_ids(self, text: str) -> tuple[int, ...]:
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token_id) for token_id in token_ids)

    def _has_control_token(self, text: str) -> bool:
        # The tokenizer may normalize a text before it searches, so the spelling alone says less.
        return not self._special.keys().isdisjoint(self.spelled_token_ids(text))

    def _replace_tokens(self, texts: Sequence[str], by: Mapping[str, str]) -> list[str]:
        return [self._spelling.sub(lambda found: by[found[0]], text) for text in texts]

    def _encode_quoted(self, rendered: str, quotes: Mapping[str, str]) -> tuple[int, ...] | None:
        """Encode a rendered text; None if the quotes or the aliases of this text are not unique."""
        aliased = self._aliased_tokenizer
        if aliased is None or not all(quote in rendered for quote in quotes.values()):
            return None
        if any(name in rendered for name in aliased.names.values()):
            return None
        (text,) = self._replace_tokens([rendered], aliased.names)
        for spelling, quote in quotes.items():
            text = text.replace(quote, spelling)
        token_ids = aliased.tokenizer.encode(text, add_special_tokens=False).ids
        # Some models have control tokens among their ordinary pieces of text.
        if (self._special.keys() - {self._tokenizer.unk_token_id}).intersection(token_ids):
            return None
        return tuple(aliased.control_ids.get(each, each) for each in token_ids)

    @cached_property
    def _aliased_tokenizer(self) -> _AliasedTokenizer | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            return None
        tokenizer = copy.deepcopy(backend)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # as if they were text
        names = dict(zip(self._special, map(chr, _ALIASES), strict=False))
        tokenizer.add_tokens(
            [
                AddedToken(
                    names[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                for token_id, token in self._special.items()
            ]
        )
        own_ids = tokenizer.get_added_tokens_decoder()
        of_names = {each.content: token_id for token_id, each in own_ids.items()}
        return _AliasedTokenizer(
            tokenizer=tokenizer,
            names={token.content: names[token_id] for token_id, token in self._special.items()},
            control_ids={of_names[name]: token_id for token_id, name in names.items()},
        )
