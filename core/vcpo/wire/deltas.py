"""The format of a sparse delta, which turns the bytes of one version into those of a later version.

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

A gap that does not fit its type is written with fillers. A filler is the type's largest number; it
means "skip that many elements, no change yet". For changed elements 1, 2 and 300, the gaps in U8
are `1, 0, 255, 42`: the last gap is 297 = 255 + 42.

Source: sparse lossless weight synchronization, arXiv 2602.03839. Departures: gaps instead of rows
and columns, so that a tensor of any rank is flat; no entropy coding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError

GAPS: Final = ":gaps"
"""Suffix of the entry with a tensor's gaps."""
VALUES: Final = ":values"
"""Suffix of the entry with a tensor's new bit patterns."""
GAP_WIDTHS: Final = (1, 2)
"""Allowed widths of a gap, in bytes."""
ELEMENT_WIDTHS: Final = (1, 2, 4, 8)
"""Allowed widths of a bit pattern, in bytes."""


def filler(width: int) -> int:
    """Return the filler of gaps with `width` bytes: the largest number of their type."""
    return (1 << 8 * width) - 1


def element_width(num_bytes: int, num_elements: int) -> int:
    """Return the bytes of one element; 1 if the tensor's elements have no width in the list."""
    width = num_bytes // num_elements if num_elements else 1
    return width if width in ELEMENT_WIDTHS and width * num_elements == num_bytes else 1


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
