"""The format of a sparse delta: what turns the bytes of one version into those of a later one.

At the learning rates of RL an optimizer step moves few bfloat16 parameters to another value: a
float32 master crosses a rounding boundary of bfloat16 about once in a hundred steps. So a delta
names the elements whose bit patterns differ, and gives their new ones. It compares bits, never
numbers: `-0.0` replaces `0.0`, and a NaN that stays costs nothing. New values, not differences,
make it exact and safe to apply twice.

A delta is a safetensors file. Each tensor that changed has two entries, one element per change,
in the order of positions in the flat tensor; a tensor that did not change has none:

```
<name>:gaps     U8 or U16       how many unchanged elements lie before the change
<name>:values   U8, U16, ...    the new bit pattern, as wide as an element of the tensor
```

A gap that its type cannot hold is written as fillers: the type's largest number means "that many
further, and no change yet". For changed elements 1, 2 and 300, the gaps in U8 are
`1, 0, 255, 42`: the last is 297 = 255 + 42.

Source: sparse lossless weight synchronization, arXiv 2602.03839. Departures: gaps instead of rows
and columns, so a tensor of any rank is flat; no entropy coder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError

GAPS: Final = ":gaps"
"""Ending of the name under which a tensor's gaps stand."""
VALUES: Final = ":values"
"""Ending of the name under which a tensor's new bit patterns stand."""
GAP_WIDTHS: Final = (1, 2)
"""Widths that a gap may have, in bytes."""
ELEMENT_WIDTHS: Final = (1, 2, 4, 8)
"""Widths that a bit pattern may have, in bytes."""


def filler(width: int) -> int:
    """The gap of `width` bytes that only moves on: the largest number of its type."""
    return (1 << 8 * width) - 1


def element_width(num_bytes: int, num_elements: int) -> int:
    """Bytes of one element; 1 where elements are no whole number of bytes that can be compared."""
    width = num_bytes // num_elements if num_elements else 1
    return width if width in ELEMENT_WIDTHS and width * num_elements == num_bytes else 1


def check_chain(
    deltas: Sequence[policy_pb2.DeltaEntry], *, base_policy_version: int, policy_version: int
) -> None:
    """Check that deltas lead from one version to another, each from where the one before ends.

    Raises:
        CorruptWeightsError: naming the version where they do not.
    """
    at = base_policy_version
    for delta in deltas:
        if delta.base_policy_version != at:
            raise CorruptWeightsError(
                f"delta: starts from version {delta.base_policy_version}, must start from {at}"
            )
        at = delta.policy_version
    if at != policy_version:
        raise CorruptWeightsError(f"delta: leads to version {at}, not to {policy_version}")
