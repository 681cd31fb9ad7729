"""Encodes sparse deltas between two versions, in the format of `vcpo.wire.deltas`, and patches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from vcpo.wire.deltas import GAP_WIDTHS, GAPS, VALUES, element_width, filler
from vcpo.wire.weights import tensor_sections
from vcpo_learner.changed_elements import Bits, ChangedElements, Positions


def encode_delta(changes: Mapping[str, ChangedElements]) -> bytes:
    """Return the delta that writes these elements, by tensor; a tensor without any is left out."""
    parts: dict[str, Bits] = {}
    for name, change in changes.items():
        if change.positions.size:
            parts[name + GAPS] = encode_gaps(change.positions)
            parts[name + VALUES] = change.bits
    delta: bytes = safetensors.numpy.save(parts)
    return delta


def write_changes(content: bytearray, changes: Mapping[str, ChangedElements]) -> None:
    """Write elements, by tensor, into a safetensors file."""
    sections = tensor_sections(content)
    for name, change in changes.items():
        section = sections[name]
        num_bytes = section.end - section.begin
        width = element_width(num_bytes, section.num_elements)
        elements = np.frombuffer(
            content, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
        )
        elements[change.positions] = change.bits


def encode_gaps(positions: Positions) -> Bits:
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
