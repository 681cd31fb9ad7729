"""Server-side apply, by the document that each manager applied last.

An object keeps these documents in `metadata.managedFields`, in place of sets of paths. A field that
a manager no longer applies, and no other one does, is removed. Applying over a value that another
manager applied is a conflict unless forced.
Departure: who changes a field by an update or a merge patch does not own it.
Sources: https://kubernetes.io/docs/reference/using-api/server-side-apply/, RFC 7386 (merge patch)
"""

import copy
import json
from collections.abc import Iterable
from typing import Any

from tests.fakes.kubernetes.errors import ApiError, JsonObject
from tests.fakes.kubernetes.patching.list_types import ATOMIC, KEY_DEFAULTS, SET, Fields, ListTypes

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
PATCH_TYPES = (APPLY, MERGE_PATCH)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: objects merge, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


Path = tuple[str, ...]
"""Elements `.field`, and `[{"name": "main"}]` of an item of a keyed list or a set."""
_PRESENT = object()
"""Stands for "this list item exists" among the leaves."""
_UNOWNED = {
    (".apiVersion",),
    (".kind",),
    (".metadata",),
    *((".metadata", f".{name}") for name in ("name", "namespace", "uid", "resourceVersion")),
}


def leaves(value: Any, lists: ListTypes) -> dict[Path, Any]:
    """Every path of a document that can have an owner, with the value there."""
    found: dict[Path, Any] = {}
    _collect(value, lists, (), (), found)
    return {path: each for path, each in found.items() if path[:2] not in _UNOWNED}


def _collect(
    value: Any, lists: ListTypes, path: Path, fields: Fields, found: dict[Path, Any]
) -> None:
    if isinstance(value, dict) and value and not (fields and lists.atomic_map(fields)):
        for key, child in value.items():
            _collect(child, lists, (*path, f".{key}"), (*fields, key), found)
        return
    keys = lists.list_keys(fields) if isinstance(value, list) and value else ATOMIC
    if keys == ATOMIC:
        found[path] = value
        return
    for item in value:
        place = (*path, _element(item, keys))
        found[place] = _PRESENT
        if keys != SET:
            _collect(item, lists, place, fields, found)


def _element(item: Any, keys: Fields) -> str:
    if keys == SET:
        return f"[{json.dumps(item)}]"
    return f"[{json.dumps({key: item.get(key, KEY_DEFAULTS.get(key)) for key in keys})}]"


def merge(live: Any, config: Any, lists: ListTypes, fields: Fields = ()) -> Any:
    """Return live with everything that config states; what config leaves out stays."""
    if isinstance(config, dict) and isinstance(live, dict):
        if fields and lists.atomic_map(fields):
            return config
        stated = {
            key: merge(live[key], value, lists, (*fields, key)) if key in live else value
            for key, value in config.items()
        }
        return {**live, **stated}
    keys = lists.list_keys(fields) if isinstance(config, list) else ATOMIC
    if keys == ATOMIC or not isinstance(live, list):
        return config
    wanted = {_element(item, keys): item for item in config}
    kept = []
    for item in live:
        mine = wanted.pop(_element(item, keys), None)
        kept.append(item if mine is None else merge(item, mine, lists, fields))
    return [*kept, *wanted.values()]


def without(document: Any, path: Path, lists: ListTypes, fields: Fields = ()) -> Any:
    """Return the document less what is at path; a container that this empties goes too."""
    element, rest = path[0], path[1:]
    if element.startswith("."):
        field = element[1:]
        if not isinstance(document, dict) or field not in document:
            return document
        child = without(document[field], rest, lists, (*fields, field)) if rest else None
        others = {key: value for key, value in document.items() if key != field}
        kept = bool(rest) and not (child in ({}, []) and document[field] != child)
        return {**others, field: child} if kept else others
    if not isinstance(document, list):
        return document
    keys, items = lists.list_keys(fields), []
    for item in document:
        if _element(item, keys) != element:
            items.append(item)
        elif rest:
            items.append(without(item, rest, lists, fields))
    return items


def apply_document(
    live: JsonObject, config: JsonObject, writer: tuple[str, str], *, force: bool, lists: ListTypes
) -> tuple[JsonObject, list[JsonObject]]:
    """Return the document that applying config gives, and what each manager applied by then.

    writer: manager and subresource.

    Raises:
        ApiError: 409 when a value of another manager would change and force is false.
    """
    entries = live["metadata"].get("managedFields") or []
    before = {(each["manager"], each["subresource"]): each["fieldsV1"] for each in entries}
    others = {key: leaves(each, lists) for key, each in before.items() if key != writer}
    stated, previous = leaves(config, lists), leaves(before.get(writer, {}), lists)
    conflicts = [
        (manager, path)
        for (manager, _), owned in others.items()
        for path in sorted(owned.keys() & stated.keys())
        if owned[path] != stated[path] and leaves(live, lists).get(path) != stated[path]
    ]
    if conflicts and not force:
        raise _conflict(conflicts)
    merged = merge(live, config, lists)
    kept = {*stated, *(path for owned in others.values() for path in owned)}
    # Whole items go first; a key of an item that stays is the item's name, and stays.
    for path in sorted(previous.keys() - stated.keys(), key=len):
        if not any(each[: len(path)] == path for each in kept) and not _is_key(path):
            merged = without(merged, path, lists)
    after = {**before, writer: config}
    return merged, [
        {"manager": key[0], "operation": "Apply", "subresource": key[1], "fieldsV1": each}
        for key, each in after.items()
    ]


def _is_key(path: Path) -> bool:
    return len(path) > 1 and path[-2].startswith("[{") and path[-1][1:] in json.loads(path[-2])[0]


def _conflict(conflicts: Iterable[tuple[str, Path]]) -> ApiError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}"',
            "field": "".join(path),
        }
        for manager, path in conflicts
    ]
    return ApiError(409, "Conflict", "Apply failed: conflict", details={"causes": causes})
