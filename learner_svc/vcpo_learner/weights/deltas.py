"""Encodes sparse deltas between two versions, in the format of `vcpo.wire.deltas`."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from vcpo.wire.deltas import GAP_WIDTHS, GAPS, VALUES, element_width, filler
from vcpo.wire.weights import TensorSection, tensor_sections

Bits = NDArray[np.unsignedinteger[Any]]
"""Elements of a tensor as unsigned integers of the same width."""


def encode_delta(base: bytes, payload: bytes) -> bytes | None:
    """Return the delta that turns `base` into `payload`, both safetensors files.

    Returns None if the layouts differ, or if the delta would not be smaller than `payload`.

    Raises:
        CorruptWeightsError: if one of them is not a safetensors file.
    """
    before, after = tensor_sections(base), tensor_sections(payload)
    if before != after:
        return None
    parts: dict[str, Bits] = {}
    room_bytes = len(payload)
    for name, section in after.items():
        was, now = _bits(base, section), _bits(payload, section)
        differs = was != now
        num_changed = int(np.count_nonzero(differs))
        room_bytes -= num_changed * (now.itemsize + min(GAP_WIDTHS))
        if room_bytes <= 0:
            return None
        if num_changed:
            positions = np.flatnonzero(differs)
            parts[name + GAPS] = encode_gaps(positions)
            parts[name + VALUES] = now[positions]
    delta: bytes = safetensors.numpy.save(parts)
    return delta if len(delta) < len(payload) else None


def encode_gaps(positions: NDArray[np.int64]) -> Bits:
    """Encode increasing positions as gaps, in the width that needs fewer bytes."""
    skipped = np.diff(positions, prepend=-1) - 1
    written = [_with_fillers(skipped, width) for width in GAP_WIDTHS]
    return min(written, key=lambda gaps: gaps.nbytes)


def _with_fillers(skipped: NDArray[np.int64], width: int) -> Bits:
    """Encode gaps in `width` bytes each; a gap that is too large becomes fillers and a rest."""
    fillers, rest = np.divmod(skipped, filler(width))
    ends = np.cumsum(fillers + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, filler(width), dtype=f"<u{width}")
    gaps[ends] = rest
    return gaps


def _bits(payload: bytes, section: TensorSection) -> Bits:
    """Return a tensor's elements as unsigned integers, without a copy."""
    num_bytes = section.end - section.begin
    width = element_width(num_bytes, section.num_elements)
    return np.frombuffer(
        payload, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
    )
