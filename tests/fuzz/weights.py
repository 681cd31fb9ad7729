"""Targets: payloads and deltas of weights, from a server or a store."""

import json
import struct
from typing import Any

from hypothesis import strategies as st

from tests.fixtures.weight_changes import delta_between
from tests.fuzz.target import Target
from vcpo.wire.deltas import apply_deltas, elements_of
from vcpo.wire.weights import CorruptWeightsError, manifest_of, tensor_sections, verify

_SIZES = {"U8": 1, "U16": 2, "I64": 8, "U64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "BOOL": 1}
_NAMES = ("weight", "bias", "weight:gaps", "weight:values", "bias:gaps", "bias:values", ":gaps")
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def safetensors_file(header: object, data: bytes) -> bytes:
    """The bytes of a file with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@st.composite
def _files(draw: st.DrawFn) -> bytes:
    """Files of a few tensors, in which an entry may be wrong."""
    header: dict[str, Any] = {}
    data = b""
    for name in draw(st.lists(st.sampled_from(_NAMES), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(_SIZES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        num_bytes = _SIZES[dtype]
        for size in shape:
            num_bytes *= size
        offsets = [len(data), len(data) + num_bytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if header and draw(st.booleans()):
        entry = header[draw(st.sampled_from(sorted(header)))]
        entry[draw(st.sampled_from(sorted(entry)))] = draw(_JSON)
    return safetensors_file(header, data)


def _check_payload(data: bytes) -> None:
    """A payload is refused, or every tensor lies in it and its own manifest accepts it."""
    try:
        manifest = manifest_of(data, policy_version=1, incarnation="a")
    except CorruptWeightsError:
        return
    verify(data, manifest)
    for section in tensor_sections(data).values():
        assert 8 <= section.begin <= section.end <= len(data)


_BASE_HEADER = {
    "weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "bias": {"dtype": "U8", "shape": [3], "data_offsets": [12, 15]},
    "none": {"dtype": "F32", "shape": [0], "data_offsets": [15, 15]},
}
_BASE = safetensors_file(_BASE_HEADER, bytes(15))


def _check_delta(data: bytes) -> None:
    """A delta is refused, or changes no byte outside of the base's tensors."""
    try:
        after = bytearray(_BASE)
        positions = apply_deltas(elements_of(after), [data])
    except CorruptWeightsError:
        return
    assert after[:-15] == _BASE[:-15]
    assert len(after) == len(_BASE)
    sections = tensor_sections(_BASE)
    for name, changed in positions.items():
        assert all(0 <= place < sections[name].num_elements for place in changed.tolist())


def _check_round_trip(data: bytes) -> None:
    """A delta between two versions of one tensor gives the later version, bit for bit.

    data: a byte each for the name and the type, then both versions; one half each.
    """
    names, types = ("weight", "a:gaps", "a:values", "", "ü"), sorted(_SIZES)
    name, dtype = (choices[data[at] % len(choices)] for at, choices in ((0, names), (1, types)))
    num_elements = (len(data) - 2) // 2 // _SIZES[dtype]
    size = num_elements * _SIZES[dtype]
    entry = {"dtype": dtype, "shape": [num_elements], "data_offsets": [0, size]}
    before, after = (
        safetensors_file({name: entry, "x": {**entry, "shape": [num_elements, 1]}}, part)
        for part in (data[2 : 2 + size], data[2 + size : 2 + 2 * size])
    )
    patched = bytearray(before)
    apply_deltas(elements_of(patched), [delta_between(before, after)])
    assert patched == after


@st.composite
def _versions(draw: st.DrawFn) -> bytes:
    """Two versions of a tensor that differ in few places, so that a delta is worth it."""
    size = draw(st.integers(0, 400))
    before = bytes(size)
    after = bytearray(before)
    for place in draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=4 if size else 0)):
        after[place] = draw(st.integers(0, 255))
    return draw(st.binary(min_size=2, max_size=2)) + before + bytes(after)


TARGETS = (
    Target(name="payload", inputs=_files() | st.binary(max_size=64), check=_check_payload),
    Target(name="delta", inputs=_files(), check=_check_delta),
    Target(
        name="delta_round_trip",
        inputs=_versions(),
        check=lambda data: _check_round_trip(data.ljust(2, b"\0")),
    ),
)
