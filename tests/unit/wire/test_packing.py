"""Packed numbers stand for the sequence that they were packed from, at four bytes each."""

import copy
import pickle
import sys

from hypothesis import given
from hypothesis import strategies as st

from vcpo.wire.packing import (
    PackedLogprobs,
    PackedTokenIds,
    pack_logprobs,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)


@given(TOKEN_IDS)
def test_token_ids_read_as_the_sequence_that_was_packed(token_ids):
    packed = unpack_token_ids("ids", pack_token_ids(token_ids), most=20)
    assert packed == token_ids
    assert tuple(token_ids) == packed
    assert hash(packed) == hash(tuple(token_ids))
    assert [packed[index] for index in range(len(packed))] == token_ids
    assert packed[-1] == token_ids[-1]
    assert packed[1:] == token_ids[1:]
    assert packed[::2] == token_ids[::2]


@given(TOKEN_IDS, TOKEN_IDS)
def test_token_ids_are_equal_when_their_numbers_are(first, second):
    packed = [PackedTokenIds(pack_token_ids(each)) for each in (first, second)]
    assert (packed[0] == packed[1]) is (first == second)
    assert (packed[0] == second) is (first == second)


def test_logprobs_are_the_float32_numbers_of_the_wire():
    packed = unpack_logprobs("logprobs", pack_logprobs([-0.5, -0.0, -1.25]), count=3)
    assert packed == (-0.5, 0.0, -1.25)
    assert packed != (-0.5, 0.0, -1.5)
    assert packed != (-0.5, 0.0)
    assert packed != "abc"


def test_what_is_packed_is_handed_on_without_a_copy():
    token_ids = PackedTokenIds(pack_token_ids([1, 2]))
    assert pack_token_ids(token_ids) is token_ids.data
    logprobs = PackedLogprobs(pack_logprobs([-1.0]))
    assert pack_logprobs(logprobs) is logprobs.data


def test_packed_numbers_can_be_copied_and_pickled():
    packed = PackedTokenIds(pack_token_ids([7, 8]))
    assert copy.deepcopy(packed) == packed
    assert pickle.loads(pickle.dumps(packed)) == packed


def test_a_number_takes_four_bytes():
    packed = PackedLogprobs(bytes(4 * 10_000))
    assert sys.getsizeof(packed) + sys.getsizeof(packed.data) < 4.1 * 10_000
    assert not hasattr(packed, "__dict__")
