"""Stop strings: found at the token that completes one, as decoding the whole text would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.rollout.tokenizers import PIECES, byte_fallback, byte_level, pieces
from vcpo.api.algorithm import Sampling
from vcpo.wire.trajectory import FinishReason
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.stop_strings import StopStrings

TOKENIZERS = {
    "pieces": pieces(),
    "bytes": byte_level(),
    "bytes, cleaned up": byte_level(cleans_up=True),
    "words and bytes": byte_fallback(),
}
BROKEN = "\N{REPLACEMENT CHARACTER}"
PROMPT = (5, 6, 7)
ENDLESS = 1 << 19
"""More tokens than a test lives to see."""


def first_end(tokenizer, token_ids, strings):
    """The number of tokens at which a response ends, by its definition; None if it does not."""
    for size in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:size], skip_special_tokens=False)
        if any(string in text for string in strings):
            return size
    return None


def found_end(stop_strings, token_ids):
    """The same as an engine finds it: asked after each token."""
    return next(
        (
            size
            for size in range(1, len(token_ids) + 1)
            if stop_strings.completed_by_last(token_ids[:size])
        ),
        None,
    )


@st.composite
def responses(draw):
    """A tokenizer, a response, and strings of which most are in its text."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    # Some models have rows for tokens that their tokenizer does not know; they write nothing.
    sampled = draw(st.lists(st.integers(0, len(tokenizer) + 3), min_size=1, max_size=60))
    written = tokenizer("Stop. 你好 the </answer>\n", add_special_tokens=False)["input_ids"]
    at = draw(st.integers(0, len(sampled)))
    token_ids = [*sampled[:at], *written, *sampled[at:]]
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    strings = {"</answer>", " "}
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        strings.add(text[start : start + draw(st.integers(1, 12))])
    chosen = draw(st.sets(st.sampled_from(sorted(strings)), min_size=1))
    return tokenizer, token_ids, sorted(each for each in chosen if BROKEN not in each) or ["Stop"]


@settings(max_examples=150, deadline=None)
@given(response=responses())
def test_a_string_is_found_at_the_token_after_which_the_whole_text_has_it(response):
    tokenizer, token_ids, strings = response
    expected = first_end(tokenizer, token_ids, strings)
    assert found_end(StopStrings(tokenizer, strings), token_ids) == expected


def test_a_run_without_stop_strings_looks_for_none():
    assert StopStrings.of(Sampling(), pieces()) is None
    sampling = Sampling.model_validate({"stopStrings": ["an", "b"]})
    of_run = StopStrings.of(sampling, pieces())
    assert of_run.completed_by_last([PIECES.index("b")])
    assert not of_run.completed_by_last([PIECES.index("a")])


@pytest.fixture
def make_batch(make_model, parameters):
    def make(*strings):
        model = make_model()
        batch = DecodeBatch(
            model,
            end_token_ids=frozenset(),
            pad_token_id=0,
            seed=0,
            stop_strings=StopStrings(pieces(), strings),
        )
        batch.swap(1, parameters(model))
        return batch

    return make


def run(batch, *requests):
    """Generations of the requests, in order."""
    sequences = [PartialSequence(request=request) for request in requests]
    batch.admit(sequences)
    ended = {}
    while batch.sequences:
        ended |= batch.step()
    return [ended[sequence] for sequence in sequences]


def test_a_response_ends_at_the_token_that_completes_a_string(make_batch, make_request):
    # Strings of two letters that often end in the middle of a piece, or in the next one.
    strings = ("an", "ns", "er", "e<", ">a", ">s", "sw")
    generations = run(make_batch(*strings), *[make_request(PROMPT, max_new_tokens=20)] * 40)
    ends = [first_end(pieces(), each.token_ids, strings) for each in generations]
    assert [len(each.token_ids) for each in generations] == [end or 20 for end in ends]
    assert [each.finish_reason for each in generations] == [
        FinishReason.STOP if end else FinishReason.LENGTH for end in ends
    ]
    assert {each.finish_reason for each in generations} == set(FinishReason)
