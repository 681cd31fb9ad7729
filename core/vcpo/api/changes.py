"""Fields of a run file that a command line sets: `algorithm.maxPolicyLagSteps=12`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from vcpo.api.errors import field_path

_SECTION: Final = "spec"
_TOP: Final = frozenset({_SECTION, "metadata", "apiVersion", "kind"})
_PART: Final = re.compile(r"(\w+)((?:\[\d+\])*)")
EXAMPLE: Final = "algorithm.maxPolicyLagSteps=12"


def change_field(document: dict[Any, Any], path: str, value: object) -> None:
    """Set one field of a parsed run file; sections that it lacks are made.

    path: as errors write it, `spec.rollouts[0].maxReplicas`, with or without `spec.`. A field that
        no run has is refused when the document is checked.
    """
    *above, last = _keys(path)
    node: Any = document
    for place, key in enumerate(above):
        _require_place(node, key, above[:place])
        if isinstance(key, str) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    _require_place(node, last, above)
    node[last] = value


def _require_place(node: object, key: str | int, above: Sequence[str | int]) -> None:
    name = field_path(above)
    if isinstance(key, int):
        if not isinstance(node, list) or key >= len(node):
            count = len(node) if isinstance(node, list) else "no"
            items = f"{count} item{'s' * (count != 1)}"
            raise ValueError(f"{name} has {items} in the file, so there is no item {key}")
    elif not isinstance(node, dict):
        item = f"{name}[{key}]" if key.isdigit() else f"{name}[0].{key}"
        fix = f"; name an item, such as {item}" if isinstance(node, list) else ""
        raise ValueError(f"{name} is not a section in the file, so it has no {key}{fix}")  # noqa: TRY004 - of a text that the user gave


def split_change(text: str) -> tuple[str, str]:
    """Return the path and the text of the value of `FIELD=VALUE`."""
    path, mark, value = text.partition("=")
    if not mark or not path.strip():
        raise ValueError(f"{text!r} must be FIELD=VALUE, such as {EXAMPLE}")
    return path.strip(), value


def _keys(path: str) -> list[str | int]:
    keys: list[str | int] = []
    for part in path.split("."):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{path!r} names no field; write it as errors do, such as {EXAMPLE}")
        keys += [found[1], *map(int, re.findall(r"\d+", found[2]))]
    return keys if keys[0] in _TOP else [_SECTION, *keys]
