"""The elements of a tensor that differ from those that were published before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger[Any]]
"""Elements of a tensor as unsigned integers of the same width."""
Positions = NDArray[np.signedinteger[Any]]
"""Positions in a flat tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangedElements:
    """Where a tensor changed, and its new bit patterns there."""

    positions: Positions
    """Rising positions in the flat tensor, [num_changes]."""
    bits: Bits
    """New bit patterns, as wide as an element, [num_changes]."""
