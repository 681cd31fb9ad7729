"""A delta restores the later version bit for bit; any other bytes are refused."""

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.weight_changes import delta_between
from vcpo.wire.deltas import apply_deltas, decode_gaps, elements_of, encode_gaps, read_delta
from vcpo.wire.weights import CorruptWeightsError, file_header

NOT_A_NUMBER, OTHER_NOT_A_NUMBER = 0x7FC0, 0x7FC1
ZERO, MINUS_ZERO, ONE, TWO = 0x0000, 0x8000, 0x3F80, 0x4000


def bfloat16(*bits, name="weight", shape=None):
    """A payload of one bfloat16 tensor with these bit patterns."""
    values = torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16))
    return safetensors.torch.save({name: values.view(torch.bfloat16).reshape(shape or (-1,))})


def delta_of(parts):
    return safetensors.numpy.save({name: np.array(*value) for name, value in parts.items()})


def apply_delta_of(base, payload):
    return applied(base, delta_between(base, payload))


def applied(base, *deltas):
    """A copy of the base into which the deltas were written."""
    payload = bytearray(base)
    apply_deltas(elements_of(payload), deltas)
    return payload


UNCHANGED = (ONE,) * 300


def test_a_delta_names_the_changed_elements_and_their_new_bits():
    delta = delta_between(bfloat16(*UNCHANGED), bfloat16(ONE, TWO, ZERO, *UNCHANGED[3:]))
    changes = read_delta(delta)
    assert changes.keys() == {"weight"}
    change = changes["weight"]
    assert change.positions.tolist() == [1, 2]
    assert change.bits.tolist() == [TWO, ZERO]


@pytest.mark.parametrize("name", ["a:gaps", "a:values", "", ":gaps", "a:values:gaps"])
def test_a_tensor_may_be_named_as_an_entry_of_a_delta(name):
    base, payload = (bfloat16(one, *UNCHANGED, name=name) for one in (ONE, TWO))
    assert apply_delta_of(base, payload) == payload


def test_a_tensor_that_did_not_change_takes_no_room():
    payload = bfloat16(NOT_A_NUMBER, *UNCHANGED)
    delta = delta_between(payload, payload)
    assert safetensors.numpy.load(delta) == {}


@pytest.mark.parametrize(
    ("was", "now"),
    [(ZERO, MINUS_ZERO), (MINUS_ZERO, ZERO), (NOT_A_NUMBER, OTHER_NOT_A_NUMBER)],
    ids=["minus zero", "zero", "another NaN"],
)
def test_bits_that_compare_equal_or_not_at_all_as_numbers_are_carried_over(was, now):
    base, payload = bfloat16(was, *UNCHANGED), bfloat16(now, *UNCHANGED)
    assert apply_delta_of(base, payload) == payload


def test_applying_a_delta_twice_changes_nothing_more():
    base, payload = bfloat16(ONE, *UNCHANGED), bfloat16(TWO, *UNCHANGED)
    delta = delta_between(base, payload)
    assert applied(base, delta, delta) == payload


def test_a_delta_of_which_one_tensor_does_not_fit_changes_no_byte():
    base = bytearray(bfloat16(ONE, ONE))
    fitting = {"weight:gaps": ([0], "u1"), "weight:values": ([TWO], "u2")}
    unknown = {"xyz:gaps": ([0], "u1"), "xyz:values": ([TWO], "u2")}
    with pytest.raises(CorruptWeightsError, match="'xyz' does not fit"):
        apply_deltas(elements_of(base), [delta_of(fitting | unknown)])
    assert base == bfloat16(ONE, ONE)


WIDTHS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@given(data=st.data(), width=st.sampled_from(sorted(WIDTHS)))
def test_any_bytes_come_back_exactly(data, width):
    count = data.draw(st.integers(600, 700))
    was = np.zeros(count, dtype=f"<u{width}")
    now = was.copy()
    places = data.draw(st.sets(st.integers(0, count - 1), max_size=20))
    for place in places:
        now[place] = data.draw(st.integers(0, 256**width - 1))
    base, payload = (
        safetensors.torch.save({"a": torch.from_numpy(bits.view("u1")).view(WIDTHS[width])})
        for bits in (was, now)
    )
    assert apply_delta_of(base, payload) == payload


@given(st.sets(st.integers(0, 200_000), min_size=1, max_size=50))
def test_positions_come_back_from_their_gaps(positions):
    rising = np.array(sorted(positions))
    assert decode_gaps(encode_gaps(rising)).tolist() == rising.tolist()


@pytest.mark.parametrize(
    ("positions", "width", "gaps"),
    [
        ([1, 2, 300], 1, [1, 0, 255, 42]),
        ([255], 1, [255, 0]),
        ([65_535, 65_536], 2, [65_535, 0, 0]),
    ],
    ids=str,
)
def test_gaps_are_written_in_the_width_that_takes_fewer_bytes(positions, width, gaps):
    written = encode_gaps(np.array(positions))
    assert (written.itemsize, written.tolist()) == (width, gaps)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes", "width"),
    [
        ("BF16", [4], 8, 2),
        ("I64", [1], 8, 8),
        ("F4", [6], 3, 1),
        ("F24", [2], 6, 1),
        ("F32", [0], 0, 1),
    ],
)
def test_elements_that_are_no_whole_word_are_compared_by_bytes(dtype, shape, num_bytes, width):
    header = file_header({"a": (dtype, shape, num_bytes)})
    elements = elements_of(header + bytes(num_bytes))["a"]
    assert (elements.itemsize, elements.nbytes) == (width, num_bytes)


GOOD = {"weight:gaps": ([1], "u1"), "weight:values": ([TWO], "u2")}


class TestWhatIsNoDelta:
    @pytest.mark.parametrize(
        ("parts", "complaint"),
        [
            ({"weight:gaps": ([1], "u1")}, "'weight:values' is missing"),
            ({"weight": ([1], "u1")}, "'weight' is missing or has no counterpart"),
            ({**GOOD, "weight:values": ([1, 2], "u2")}, "has 1 positions and 2 values"),
            ({**GOOD, "weight:gaps": ([255], "u1")}, "has 0 positions and 1 values"),
            ({**GOOD, "weight:gaps": ([1], "i8")}, "of an unknown type"),
            ({**GOOD, "weight:values": ([[TWO]], "u2")}, "of an unknown type"),
            ({**GOOD, "weight:values": ([2.0], "f4")}, "of an unknown type"),
        ],
        ids=["half", "neither", "too many", "only fillers", "wide", "matrix", "numbers"],
    )
    def test_it_is_refused_with_the_reason(self, parts, complaint):
        with pytest.raises(CorruptWeightsError, match=complaint):
            read_delta(delta_of(parts))

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"other:gaps": ([0], "u1"), "other:values": ([0], "u2")}, "'other' does not fit"),
            ({**GOOD, "weight:gaps": ([2], "u1")}, "has 2 elements, and none at 2"),
            ({**GOOD, "weight:values": ([0], "u8")}, "'weight' does not fit the base"),
        ],
        ids=["unknown", "behind the end", "wider than the tensor"],
    )
    def test_what_does_not_fit_the_base_is_refused(self, changes, complaint):
        with pytest.raises(CorruptWeightsError, match=complaint):
            apply_deltas(elements_of(bytearray(bfloat16(ONE, ONE))), [delta_of(changes)])

    def test_a_tensor_of_numbers_that_numpy_lacks_is_refused(self):
        with pytest.raises(CorruptWeightsError, match="delta"):
            read_delta(bfloat16(ONE, name="weight:values"))

    @given(st.binary(max_size=200))
    def test_random_bytes_are_never_worse_than_corrupt(self, delta):
        with pytest.raises(CorruptWeightsError):
            read_delta(delta)
