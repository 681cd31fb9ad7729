"""Merging a user's part of a pod template over the operator's, as a strategic merge patch.

Maps merge, and null removes a field. Lists of named items merge by their key, so a user can add one
volume, or set the resources of one container, without repeating the operator's. Every other list is
replaced. A value of another shape than the operator's is refused by its path, so later code need
not check shapes; so is a patch that names an item twice. Departure from Kubernetes: `$patch`
directives are not supported.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists of a pod template that merge, with the key of their items, as the API declares them."""
_DEFAULTS: Final = {"protocol": "TCP"}
"""Fields of keys that an item may leave out."""

_NEEDED: Final = frozenset({"spec", "spec.containers"})


def merge_template(
    base: Mapping[str, Any], patch: Mapping[str, Any], *, path: str = ""
) -> dict[str, Any]:
    """Return a copy of `base` with `patch` merged over it.

    Raises: ValueError that names a value of `patch` that is no map or list where `base` has one, a
        list whose items lack their key, or a field that cannot be removed.
    """
    merged = dict(base)
    for name, value in patch.items():
        below, here = merged.get(name), f"{path}.{name}" if path else name
        if value is None:
            if here in _NEEDED:
                raise ValueError(f"`{here}` cannot be removed; leave it out to keep the default")
            merged.pop(name, None)
        elif isinstance(below, Mapping) and not isinstance(value, Mapping):
            raise ValueError(f"`{here}` must be a map, got {value!r}")
        elif isinstance(below, list) and not isinstance(value, list):
            raise ValueError(f"`{here}` must be a list, got {value!r}")
        elif isinstance(value, Mapping):
            ours = below if isinstance(below, Mapping) else {}
            merged[name] = merge_template(ours, value, path=here)
        elif name in MERGE_KEYS and isinstance(value, list):
            items = below if isinstance(below, list) else []
            merged[name] = _merge_lists(items, value, name, path=here)
        else:
            merged[name] = value
    return merged


def _merge_lists(
    base: Sequence[Mapping[str, Any]], patch: Sequence[Any], field: str, *, path: str
) -> list[dict[str, Any]]:
    fields, patched = MERGE_KEYS[field], set()
    merged = {_key(item, fields): dict(item) for item in base}
    for item in patch:
        key = _key(item, fields) if isinstance(item, Mapping) else ()
        for name, part in zip(fields, key or (None,), strict=False):
            if part is None or isinstance(part, Mapping | list):
                raise ValueError(f"each item of `{path}` must have `{name}`, got {item!r}")
        named = f"{path}[{', '.join(map(str, key))}]"
        if key in patched:
            raise ValueError(f"`{named}` stands there twice; write it once, with all of its fields")
        patched.add(key)
        merged[key] = merge_template(merged.get(key, {}), item, path=f"{path}[{key[0]}]")
    return list(merged.values())


def _key(item: Mapping[str, Any], fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(item.get(name, _DEFAULTS.get(name)) for name in fields)
