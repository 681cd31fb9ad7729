"""Patches weights in place with sparse deltas; `vcpo.wire.deltas` describes their format.

A delta is read and checked as a whole before it changes any byte. The caller must still verify the
result against the version's manifest: a delta also fits a wrong base, and then gives wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from vcpo.wire.deltas import ELEMENT_WIDTHS, GAP_WIDTHS, GAPS, VALUES, element_width, filler
from vcpo.wire.weights import CorruptWeightsError, TensorSection, tensor_sections

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorChange:
    """The elements of one tensor that change, and their new bit patterns."""

    name: str
    positions: NDArray[np.int64]
    """Rising positions in the flat tensor, [num_changes]."""
    bits: Bits
    """New bit patterns, as wide as an element, [num_changes]."""


def read_delta(delta: bytes | bytearray) -> tuple[TensorChange, ...]:
    """Return the changes in a delta.

    Raises:
        CorruptWeightsError: when the bytes are not a delta; the message names the wrong entry.
    """
    try:
        parts = safetensors.numpy.load(bytes(delta))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptWeightsError(f"delta: not a safetensors file of integers ({error})") from error
    names = sorted({_tensor_name(entry) for entry in parts})
    unpaired = parts.keys() ^ {name + ending for name in names for ending in (GAPS, VALUES)}
    if unpaired:
        raise CorruptWeightsError(f"delta: {min(unpaired)!r} is missing or has no counterpart")
    return tuple(_change(name, parts[name + GAPS], parts[name + VALUES]) for name in names)


def apply_deltas(
    payload: bytearray, deltas: Iterable[bytes | bytearray]
) -> dict[str, NDArray[np.int64]]:
    """Write deltas into a payload, in order; return the changed positions.

    Returns: the positions by tensor, rising positions in the flat tensor, [num_changes].

    Raises:
        CorruptWeightsError: when a delta is malformed or does not fit; it names the tensor. Those
            before it are written.
    """
    sections = tensor_sections(payload)
    positions: dict[str, NDArray[np.int64]] = {}
    for delta in deltas:
        changes = read_delta(delta)
        rooms = [_room(change, payload, sections.get(change.name)) for change in changes]
        for change, elements in zip(changes, rooms, strict=True):
            elements[change.positions] = change.bits
            before = positions.get(change.name)
            positions[change.name] = (
                change.positions if before is None else np.union1d(before, change.positions)
            )
    return positions


def decode_gaps(gaps: Bits) -> NDArray[np.int64]:
    """Return the positions that gaps encode; fillers encode no position."""
    positions: NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)
    positions = positions[gaps != filler(gaps.itemsize)]
    positions += np.arange(positions.size)
    return positions


def _tensor_name(entry: str) -> str:
    return entry.removesuffix(GAPS if entry.endswith(GAPS) else VALUES)


def _change(name: str, gaps: Bits, bits: Bits) -> TensorChange:
    if not _is_flat(gaps, GAP_WIDTHS) or not _is_flat(bits, ELEMENT_WIDTHS):
        raise CorruptWeightsError(f"delta: {name!r} has gaps or values of an unknown type")
    positions = decode_gaps(gaps)
    if positions.size != bits.size:
        raise CorruptWeightsError(
            f"delta: {name!r} has {positions.size} positions and {bits.size} values"
        )
    return TensorChange(name=name, positions=positions, bits=bits)


def _is_flat(array: NDArray[Any], widths: Iterable[int]) -> bool:
    return array.ndim == 1 and array.dtype.kind == "u" and array.itemsize in widths


def _room(change: TensorChange, payload: bytearray, section: TensorSection | None) -> Bits:
    """Return the elements of the tensor that a change is written to, in the payload's memory."""
    width = change.bits.itemsize
    num_bytes = section.end - section.begin if section else 0
    if section is None or width != element_width(num_bytes, section.num_elements):
        raise CorruptWeightsError(f"delta: {change.name!r} does not fit the base version")
    elements: Bits = np.frombuffer(
        payload, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
    )
    if change.positions.size and change.positions[-1] >= elements.size:
        raise CorruptWeightsError(
            f"delta: {change.name!r} has {elements.size} elements, and none at"
            f" {change.positions[-1]}"
        )
    return elements
