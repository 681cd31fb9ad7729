"""Sparse deltas, which turn the bytes of one version into those of a later version.

At the learning rates of RL an optimizer step changes few bfloat16 parameters: a float32 master
weight crosses a rounding boundary of bfloat16 about once in a hundred steps. A delta therefore
lists the elements whose bit patterns differ, with the new bit patterns. It compares bits and not
numbers: `-0.0` replaces `0.0`, and an unchanged NaN costs nothing. It stores new values and not
differences, so it is exact and can be applied twice.

A delta is a safetensors file. Each changed tensor has two entries with one element per change, in
the order of positions in the flat tensor. An unchanged tensor has no entry.

```
<name>:gaps     U8 or U16       number of unchanged elements before the change
<name>:values   U8, U16, ...    the new bit pattern, as wide as an element of the tensor
```

A gap that does not fit its type has fillers before it, the type's largest number: for changed
elements 1, 2 and 300 the gaps in U8 are `1, 0, 255, 42`.

Source: sparse lossless weight synchronization, arXiv 2602.03839. Departures: gaps instead of rows
and columns, so that a tensor of any rank is flat; no entropy coding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, Payload, tensor_sections

Bits = NDArray[np.unsignedinteger[Any]]
"""Elements of a flat tensor as unsigned integers of the same width."""
Positions = NDArray[np.signedinteger[Any]]
"""Rising positions in a flat tensor."""
GAPS: Final = ":gaps"
"""Suffix of the entry with a tensor's gaps."""
VALUES: Final = ":values"
"""Suffix of the entry with a tensor's new bit patterns."""
_GAP_WIDTHS: Final = (1, 2)
"""Allowed widths of a gap, in bytes."""
_ELEMENT_WIDTHS: Final = (1, 2, 4, 8)
"""Allowed widths of a bit pattern, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangedElements:
    """Where a tensor changed, and its new bit patterns there."""

    positions: Positions
    """Rising positions in the flat tensor, [num_changes]."""
    bits: Bits
    """New bit patterns, as wide as an element, [num_changes]."""


def encode_delta(changes: Mapping[str, ChangedElements]) -> bytes:
    """Return the delta that writes these elements, by tensor; a tensor without any is left out."""
    parts: dict[str, Bits] = {}
    for name, change in changes.items():
        if change.positions.size:
            parts[name + GAPS] = encode_gaps(change.positions)
            parts[name + VALUES] = change.bits
    delta: bytes = safetensors.numpy.save(parts)
    return delta


def read_delta(delta: bytes | bytearray) -> dict[str, ChangedElements]:
    """Return the changes in a delta, by tensor.

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
    return {name: _change(name, parts[name + GAPS], parts[name + VALUES]) for name in names}


def elements_of(payload: Payload) -> dict[str, Bits]:
    """Return the elements of each tensor of a safetensors file, flat, in the file's own memory.

    Raises:
        CorruptWeightsError: if the payload is no safetensors file.
    """
    found: dict[str, Bits] = {}
    for name, section in tensor_sections(payload).items():
        num_bytes = section.end - section.begin
        width = num_bytes // section.num_elements if section.num_elements else 1
        if width not in _ELEMENT_WIDTHS or width * section.num_elements != num_bytes:
            width = 1
        found[name] = np.frombuffer(
            payload, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
        )
    return found


def write_changes(elements: Mapping[str, Bits], changes: Mapping[str, ChangedElements]) -> None:
    """Write elements, by tensor, into flat tensors of the same names.

    Raises:
        CorruptWeightsError: naming the tensor of the first change that does not fit; nothing is
            written then.
    """
    for name, change in changes.items():
        held = elements.get(name)
        if held is None or change.bits.itemsize != held.itemsize:
            raise CorruptWeightsError(f"delta: {name!r} does not fit the base version")
        if change.positions.size and change.positions[-1] >= held.size:
            raise CorruptWeightsError(
                f"delta: {name!r} has {held.size} elements, and none at {change.positions[-1]}"
            )
    for name, change in changes.items():
        elements[name][change.positions] = change.bits


def apply_deltas(
    elements: Mapping[str, Bits], deltas: Iterable[bytes | bytearray]
) -> dict[str, Positions]:
    """Write deltas into flat tensors, in order; return the changed positions, by tensor.

    The caller must still verify the result against the version's manifest: a delta also fits a
    wrong base, and then gives wrong bytes.

    Raises:
        CorruptWeightsError: when a delta is malformed or does not fit; it names the tensor. Those
            before it are written.
    """
    positions: dict[str, Positions] = {}
    for delta in deltas:
        changes = read_delta(delta)
        write_changes(elements, changes)
        for name, change in changes.items():
            before = positions.get(name)
            positions[name] = (
                change.positions if before is None else np.union1d(before, change.positions)
            )
    return positions


def encode_gaps(positions: Positions) -> Bits:
    """Encode rising positions as gaps, in the width that needs fewer bytes."""
    skipped = np.diff(positions, prepend=-1) - 1
    written = [_with_fillers(skipped, width) for width in _GAP_WIDTHS]
    return min(written, key=lambda gaps: gaps.nbytes)


def decode_gaps(gaps: Bits) -> NDArray[np.int64]:
    """Return the positions that gaps encode; fillers encode no position."""
    positions: NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)
    positions = positions[gaps != _filler(gaps.itemsize)]
    positions += np.arange(positions.size)
    return positions


def chain_to(
    manifest: policy_pb2.PolicyManifest, held_version: int | None
) -> tuple[bool, Sequence[policy_pb2.DeltaEntry]]:
    """Return what a worker reads to get a version: whether the full set, and then which deltas.

    manifest: of one shard.
    held_version: version of the set that the worker holds; None if it holds none of the
        incarnation.

    Raises:
        CorruptWeightsError: naming the version at which the chain breaks, if the deltas do not lead
            to the version.
    """
    deltas = manifest.deltas
    at = deltas[0].base_policy_version if deltas else manifest.policy_version
    for delta in deltas:
        if delta.base_policy_version != at:
            raise CorruptWeightsError(
                f"delta: starts at version {delta.base_policy_version}, must start at {at}"
            )
        at = delta.policy_version
    if at != manifest.policy_version:
        raise CorruptWeightsError(
            f"delta: ends at version {at}, must end at {manifest.policy_version}"
        )
    bases = [delta.base_policy_version for delta in deltas]
    if held_version in bases:
        return False, deltas[bases.index(held_version) :]
    full = manifest.full_set_version
    if full == manifest.policy_version:
        return True, ()
    if full not in bases:
        raise CorruptWeightsError(
            f"full_set_version: no deltas lead from {full} to {manifest.policy_version}"
        )
    return True, deltas[bases.index(full) :]


def _filler(width: int) -> int:
    return (1 << 8 * width) - 1


def _with_fillers(skipped: NDArray[np.int64], width: int) -> Bits:
    """Encode gaps in `width` bytes each; a gap that is too large becomes fillers and a rest."""
    fillers, rest = np.divmod(skipped, _filler(width))
    ends = np.cumsum(fillers + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, _filler(width), dtype=f"<u{width}")
    gaps[ends] = rest
    return gaps


def _tensor_name(entry: str) -> str:
    return entry.removesuffix(GAPS if entry.endswith(GAPS) else VALUES)


def _change(name: str, gaps: Bits, bits: Bits) -> ChangedElements:
    if not _is_flat(gaps, _GAP_WIDTHS) or not _is_flat(bits, _ELEMENT_WIDTHS):
        raise CorruptWeightsError(f"delta: {name!r} has gaps or values of an unknown type")
    positions = decode_gaps(gaps)
    if positions.size != bits.size:
        raise CorruptWeightsError(
            f"delta: {name!r} has {positions.size} positions and {bits.size} values"
        )
    return ChangedElements(positions=positions, bits=bits)


def _is_flat(array: NDArray[Any], widths: Iterable[int]) -> bool:
    return array.ndim == 1 and array.dtype.kind == "u" and array.itemsize in widths
