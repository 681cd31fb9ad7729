"""The tokens of a model: which rows of its embedding and its head its tokenizer has a token for.

Models have more rows than tokens: for round shapes, or for tokens that were never used. A spare row
has a logit like any other. Neither workers nor learner let it into a softmax, so no token is drawn
that the environment cannot read, and both sides mean the same distribution.

A loaded model carries its vocabulary. Everything that samples with it or scores with it asks there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

_ATTRIBUTE: Final = "vcpo_vocabulary"


class Tokenizer(Protocol):
    """A tokenizer of transformers."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Tokens with a role, such as the one that ends a text."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return ids by token; where several tokens look alike, not all."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Return the token of an id; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids that may be sampled."""

    num_tokens: int
    """One more than the largest id."""
    holes: tuple[int, ...] = ()
    """Smaller ids without a token, ascending; few tokenizers have any."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, num_rows: int) -> Self:
        ids = frozenset(tokenizer.get_vocab().values())
        if ids <= set(tokenizer.all_special_ids):
            raise ValueError("the tokenizer has no token for text; its files are missing")
        num_tokens = min(max(ids) + 1, num_rows)
        unnamed = (each for each in range(num_tokens) if each not in ids)
        holes = tuple(each for each in unnamed if tokenizer.convert_ids_to_tokens(each) is None)
        return cls(num_tokens=num_tokens, holes=holes)


def num_rows(model: Any) -> int:
    """Return how many ids have a row in the embedding and in the head of a transformers model."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return min(len(each.weight) for each in (embedding, head) if each is not None)


def keep_vocabulary(model: Any, tokenizer: Tokenizer) -> None:
    """Make a model carry its vocabulary."""
    setattr(model, _ATTRIBUTE, Vocabulary.of(tokenizer, num_rows=num_rows(model)))


def vocabulary_of(model: Any) -> Vocabulary | None:
    """Return the vocabulary that a model carries; None if every row is a token."""
    vocabulary: Vocabulary | None = getattr(model, _ATTRIBUTE, None)
    return vocabulary


def num_tokens(model: Any) -> int:
    """Return one more than the largest id that a model reads and samples."""
    vocabulary = vocabulary_of(model)
    return num_rows(model) if vocabulary is None else vocabulary.num_tokens
