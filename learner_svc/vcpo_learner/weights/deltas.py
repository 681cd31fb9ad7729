"""Making sparse deltas between two versions; `vcpo.wire.deltas` says what they look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from vcpo.wire.deltas import GAP_WIDTHS, GAPS, VALUES, element_width, filler
from vcpo.wire.weights import TensorSection, tensor_sections

Bits = NDArray[np.unsignedinteger[Any]]


def encode_delta(base: bytes, payload: bytes) -> bytes | None:
    """Return what turns `base` into `payload`, both safetensors files; None when it does not pay.

    It does not when the layouts differ, or when so much has changed that the whole set is smaller.

    Raises:
        CorruptWeightsError: when either is no safetensors file.
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
    """Write rising positions as gaps, in the width that takes fewer bytes."""
    skipped = np.diff(positions, prepend=-1) - 1
    written = [_with_fillers(skipped, width) for width in GAP_WIDTHS]
    return min(written, key=lambda gaps: gaps.nbytes)


def _with_fillers(skipped: NDArray[np.int64], width: int) -> Bits:
    fillers, rest = np.divmod(skipped, filler(width))
    ends = np.cumsum(fillers + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, filler(width), dtype=f"<u{width}")
    gaps[ends] = rest
    return gaps


def _bits(payload: bytes, section: TensorSection) -> Bits:
    num_bytes = section.end - section.begin
    width = element_width(num_bytes, section.num_elements)
    return np.frombuffer(
        payload, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
    )
