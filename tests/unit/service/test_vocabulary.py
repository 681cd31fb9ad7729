"""Which ids are tokens, from real tokenizers and from those whose map of tokens is lossy."""

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.fixtures.vocabularies import tokenizer_of
from vcpo.service.vocabulary import (
    Vocabulary,
    keep_vocabulary,
    num_tokens,
    vocabulary_of,
)

SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


class Lossy:
    """Two tokens look alike, so that the map from tokens to ids has one of them."""

    all_special_ids = (0,)

    def get_vocab(self):
        return {"<s>": 0, "a": 1, "?": 3}

    def convert_ids_to_tokens(self, ids):
        return ("<s>", "a", "?", "?")[ids]


def test_the_largest_id_ends_the_vocabulary_and_ids_between_are_holes():
    found = Vocabulary.of(tokenizer_of([0, 1, 4, 6]), num_rows=12)
    assert found == Vocabulary(num_tokens=7, holes=(2, 3, 5))


def test_tokens_added_to_a_tokenizer_are_tokens():
    tokenizer = tokenizer_of([0, 1, 2])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens(["new"])
    assert Vocabulary.of(tokenizer, num_rows=12) == Vocabulary(num_tokens=5)


def test_tokens_without_a_row_are_no_tokens_of_the_model():
    found = Vocabulary.of(tokenizer_of([0, 2, 5, 9, 20]), num_rows=8)
    assert found == Vocabulary(num_tokens=8, holes=(1, 3, 4, 6, 7))


def test_a_token_that_looks_like_another_is_no_hole():
    assert Vocabulary.of(Lossy(), num_rows=12) == Vocabulary(num_tokens=4)


def test_a_tokenizer_of_no_files_is_refused():
    # As transformers makes one for a folder that has none: with its special tokens only.
    empty = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"<end>": 0}, merges=[])), eos_token="<end>"
    )
    with pytest.raises(ValueError, match="no token for text; its files are missing"):
        Vocabulary.of(empty, num_rows=12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_carries_its_vocabulary_and_without_one_every_row_is_a_token(tied):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    assert vocabulary_of(model) is None
    assert num_tokens(model) == 12
    keep_vocabulary(model, tokenizer_of([0, 1, 3]))
    assert vocabulary_of(model) == Vocabulary(num_tokens=4, holes=(2,))
    assert num_tokens(model) == 4
    assert "vcpo" not in model.config.to_json_string()
