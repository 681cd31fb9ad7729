"""Overlay: a user's part of a pod template merged over ours, as a strategic merge patch would.

Maps merge, null removes. Lists of named things merge by their key, so that a user adds one volume
or sets the resources of one container without repeating ours; every other list is replaced.
Departure: none of the `$patch` directives is understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a pod template that merge, with the key of their items, as the API declares them."""


def overlaid(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `patch` merged over it.

    Raises: ValueError naming the list of `patch` whose items lack their key.
    """
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            below = merged.get(name)
            merged[name] = overlaid(below if isinstance(below, Mapping) else {}, value)
        elif name in MERGE_KEYS and isinstance(value, Sequence):
            merged[name] = _merged_list(name, merged.get(name) or (), value)
        else:
            merged[name] = value
    return merged


def _merged_list(
    name: str, base: Sequence[Mapping[str, Any]], patch: Sequence[Any]
) -> list[dict[str, Any]]:
    key = MERGE_KEYS[name]
    merged = {item[key]: dict(item) for item in base}
    for item in patch:
        if not isinstance(item, Mapping) or key not in item:
            raise ValueError(f"template: each item of `{name}` must have `{key}`, got {item!r}")
        merged[item[key]] = overlaid(merged.get(item[key], {}), item)
    return list(merged.values())
