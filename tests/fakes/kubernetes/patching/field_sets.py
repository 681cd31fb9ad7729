"""Sets of field paths in the notation of `fieldsV1`, and edits of documents by such paths.

A path is a tuple of elements: `f:<field>`, `k:<keys as JSON>` for an item of a keyed list,
`v:<value as JSON>` for an item of a set. A path is in a set when its owner answers for the leaf
there (a scalar, an empty container, something atomic) or for the existence of a list item.
Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.patching.list_types import ATOMIC, KEY_DEFAULTS, SET, Fields, ListTypes

Path = tuple[str, ...]
FieldSet = frozenset[Path]

_PRESENT = object()
"""Stands for "this list item exists" among the leaves."""


def leaves(value: Any, lists: ListTypes) -> dict[Path, Any]:
    """Every path of a document that can have an owner, with the value there."""
    found: dict[Path, Any] = {}
    _collect(value, lists, (), (), found)
    return found


def _collect(
    value: Any, lists: ListTypes, path: Path, fields: Fields, found: dict[Path, Any]
) -> None:
    if isinstance(value, dict) and value and not (fields and lists.atomic_map(fields)):
        for key, child in value.items():
            _collect(child, lists, (*path, f"f:{key}"), (*fields, key), found)
        return
    keys = lists.list_keys(fields) if isinstance(value, list) and value else ATOMIC
    if keys == ATOMIC:
        found[path] = value
        return
    for item in value:
        place = (*path, item_element(item, keys))
        found[place] = _PRESENT
        if keys != SET:
            _collect(item, lists, place, fields, found)


def item_element(item: Any, keys: Fields) -> str:
    """The path element of a list item: `k:{"name":"main"}` or `v:"text"`."""
    if keys == SET:
        return f"v:{json.dumps(item)}"
    named = {key: item.get(key, KEY_DEFAULTS.get(key)) for key in keys}
    return "k:" + json.dumps(named, sort_keys=True, separators=(",", ":"))


def to_fields_v1(paths: Iterable[Path]) -> JsonObject:
    """The nested form that `managedFields[].fieldsV1` holds."""
    root: JsonObject = {}
    members = set(paths)
    for path in sorted(members):
        node = root
        for element in path:
            node = node.setdefault(element, {})
    for path in members:
        node = root
        for element in path:
            node = node[element]
        if any(element != "." for element in node):
            node["."] = {}
    return root


def from_fields_v1(nested: Mapping[str, Any], path: Path = ()) -> FieldSet:
    """The inverse of to_fields_v1."""
    if not nested:
        return frozenset({path}) if path else frozenset()
    found = {path} if "." in nested else set()
    for element, child in nested.items():
        if element != ".":
            found |= from_fields_v1(child, (*path, element))
    return frozenset(found)


def covers(paths: Iterable[Path], prefix: Path) -> bool:
    """Whether any of the paths is prefix or lies below it."""
    return any(path[: len(prefix)] == prefix for path in paths)


def is_key(path: Path) -> bool:
    """Whether path is one of the fields that identify its list item."""
    if len(path) < 2 or not path[-2].startswith("k:"):
        return False
    return path[-1][2:] in json.loads(path[-2][2:])


def merge(live: Any, config: Any, lists: ListTypes, fields: Fields = ()) -> Any:
    """live with everything that config states; what config leaves out stays."""
    if isinstance(config, dict) and isinstance(live, dict):
        if fields and lists.atomic_map(fields):
            return config
        merged = dict(live)
        for key, value in config.items():
            present = key in live
            child = (*fields, key)
            merged[key] = merge(live[key], value, lists, child) if present else value
        return merged
    if isinstance(config, list) and isinstance(live, list):
        return _merge_items(live, config, lists, fields)
    return config


def _merge_items(live: list[Any], config: list[Any], lists: ListTypes, fields: Fields) -> list[Any]:
    keys = lists.list_keys(fields)
    if keys == ATOMIC:
        return config
    stated = {item_element(item, keys): item for item in config}
    merged = []
    for item in live:
        element = item_element(item, keys)
        wanted = stated.pop(element, None)
        merged.append(item if wanted is None else merge(item, wanted, lists, fields))
    return [*merged, *stated.values()]


def without(document: Any, path: Path, lists: ListTypes, fields: Fields = ()) -> Any:
    """The document less what is at path; a container that this empties goes too."""
    element, rest = path[0], path[1:]
    if element.startswith("f:"):
        field = element[2:]
        if not isinstance(document, dict) or field not in document:
            return document
        child = without(document[field], rest, lists, (*fields, field)) if rest else None
        others = {key: value for key, value in document.items() if key != field}
        kept = bool(rest) and not (child in ({}, []) and document[field] != child)
        return {**others, field: child} if kept else others
    if not isinstance(document, list):
        return document
    keys = lists.list_keys(fields)
    items = []
    for item in document:
        if item_element(item, keys) != element:
            items.append(item)
        elif rest:
            items.append(without(item, rest, lists, fields))
    return items
