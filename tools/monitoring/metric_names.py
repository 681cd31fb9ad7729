"""The names that a PromQL expression reads."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OF_HISTOGRAM: Final = ("_bucket", "_count", "_sum")


def names_in(expression: str) -> frozenset[str]:
    """Return every word of an expression, among them its series; of `x_bucket` also `x`."""
    words = set(_NAME.findall(expression))
    families = {word.removesuffix(end) for word in words for end in _OF_HISTOGRAM}
    return frozenset(words | families)
