"""Field ownership in `metadata.managedFields`, and server-side apply based on it.

Invariant: a field has as owners all who applied its present value and have not let go of it, and
the last writer who changed it. Applying over somebody else's value is a conflict unless forced;
leaving out a field that one alone applied removes it.
Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fakes.kubernetes.errors import ApiError, JsonObject
from tests.fakes.kubernetes.patching.field_sets import (
    FieldSet,
    Path,
    covers,
    from_fields_v1,
    is_key,
    leaves,
    merge,
    to_fields_v1,
    without,
)
from tests.fakes.kubernetes.patching.list_types import ListTypes

_UNOWNED = {
    ("f:apiVersion",),
    ("f:kind",),
    *(
        ("f:metadata", f"f:{field}")
        for field in (
            "creationTimestamp",
            "deletionGracePeriodSeconds",
            "deletionTimestamp",
            "generation",
            "managedFields",
            "name",
            "namespace",
            "resourceVersion",
            "selfLink",
            "uid",
        )
    ),
    ("f:metadata",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Whoever changes an object. subresource: empty for the object itself."""

    manager: str
    operation: str
    api_version: str
    subresource: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One writer's fields. time: when the set last changed, RFC 3339."""

    writer: Writer
    paths: FieldSet
    time: str


def entries_of(body: JsonObject) -> tuple[Entry, ...]:
    """The ledger of an object."""
    return tuple(
        Entry(
            writer=Writer(
                manager=entry["manager"],
                operation=entry["operation"],
                api_version=entry["apiVersion"],
                subresource=entry.get("subresource", ""),
            ),
            paths=from_fields_v1(entry["fieldsV1"]),
            # A real server gives no time to the entry of an apply that changed no value.
            time=entry.get("time", ""),
        )
        for entry in body["metadata"].get("managedFields") or ()
    )


def with_entries(body: JsonObject, entries: Iterable[Entry]) -> JsonObject:
    """The object with this ledger instead of its own."""
    listed = []
    for entry in entries:
        if not entry.paths:
            continue
        listed.append(
            {
                "manager": entry.writer.manager,
                "operation": entry.writer.operation,
                "apiVersion": entry.writer.api_version,
                "time": entry.time,
                "fieldsType": "FieldsV1",
                "fieldsV1": to_fields_v1(entry.paths),
            }
            | ({"subresource": entry.writer.subresource} if entry.writer.subresource else {})
        )
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    return {**body, "metadata": {**metadata, "managedFields": listed} if listed else metadata}


def owned_leaves(body: JsonObject, lists: ListTypes) -> dict[Path, Any]:
    """Every path that can have an owner: all but the server's own fields."""
    return {
        path: value
        for path, value in leaves(body, lists).items()
        if path not in _UNOWNED and path[:2] not in _UNOWNED
    }


def record_update(
    before: JsonObject | None, after: JsonObject, writer: Writer, time: str, lists: ListTypes
) -> JsonObject:
    """after with the ledger that follows when writer turned before into it."""
    old = owned_leaves(before, lists) if before else {}
    new = owned_leaves(after, lists)
    changed = frozenset(p for p, value in new.items() if p not in old or old[p] != value)
    removed = frozenset(old.keys() - new.keys())
    entries = entries_of(before) if before else ()
    mine = next((entry.paths for entry in entries if entry.writer == writer), frozenset())
    owned = (mine - removed) | changed
    return with_entries(after, _ledger(entries, writer, owned, changed | removed, time))


def _ledger(
    entries: Iterable[Entry], writer: Writer, owned: FieldSet, lost: FieldSet, time: str
) -> Iterator[Entry]:
    """The entries with writer's set replaced and lost taken from the others, in their order."""
    found = False
    for entry in entries:
        paths = owned if entry.writer == writer else entry.paths - lost
        found = found or entry.writer == writer
        yield entry if paths == entry.paths else replace(entry, paths=paths, time=time)
    if not found:
        yield Entry(writer=writer, paths=owned, time=time)


def apply_configuration(
    live: JsonObject, config: JsonObject, writer: Writer, *, force: bool, lists: ListTypes
) -> tuple[JsonObject, FieldSet]:
    """The document that applying config gives, and the set that writer owns afterwards.

    Raises:
        ApiError: 409 when another writer's value would change and force is false.
    """
    applied = frozenset(owned_leaves(config, lists))
    entries = entries_of(live)
    others = [entry for entry in entries if entry.writer != writer]
    previous = next((entry.paths for entry in entries if entry.writer == writer), frozenset())
    merged = merge(live, config, lists)
    kept = frozenset().union(applied, *(entry.paths for entry in others))
    # Whole items go first; a key of an item that stays is the item's name, and stays.
    for path in sorted(previous - applied, key=len):
        if not covers(kept, path) and not is_key(path):
            merged = without(merged, path, lists)
    if not force:
        _refuse_conflicts(live, merged, others, lists)
    return merged, applied


def _refuse_conflicts(
    live: JsonObject, merged: JsonObject, others: Iterable[Entry], lists: ListTypes
) -> None:
    old, new = owned_leaves(live, lists), owned_leaves(merged, lists)
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{entry.writer.manager}" using {entry.writer.api_version}',
            "field": field_text(path),
        }
        for entry in others
        for path in sorted(entry.paths & changed)
    ]
    if not causes:
        return
    listed = "\n".join(f"- {cause['field']}" for cause in causes)
    plural = "conflict" if len(causes) == 1 else "conflicts"
    message = f"Apply failed with {len(causes)} {plural}: {causes[0]['message']}:\n{listed}"
    raise ApiError(409, "Conflict", message, details={"causes": causes})


def field_text(path: Path) -> str:
    """A path as messages write it: `.spec.containers[name="c"].image`."""
    return "".join(_element_text(element) for element in path)


def _element_text(element: str) -> str:
    kind, rest = element[:2], element[2:]
    if kind == "f:":
        return f".{rest}"
    if kind == "v:":
        return f"[={rest}]"
    keys = json.loads(rest).items()
    return "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in keys) + "]"


def record_apply(
    before: JsonObject,
    after: JsonObject,
    writer: Writer,
    applied: FieldSet,
    time: str,
    lists: ListTypes,
) -> JsonObject:
    """after with the ledger that follows when writer applied the paths in applied."""
    old, new = owned_leaves(before, lists), owned_leaves(after, lists)
    changed = frozenset(p for p, value in new.items() if p not in old or old[p] != value)
    lost = frozenset(old.keys() - new.keys()) | changed
    return with_entries(after, _ledger(entries_of(before), writer, applied, lost, time))


def owners(body: JsonObject, field: str) -> set[str]:
    """Managers that own a field, written as in messages: `.spec.replicas`."""
    return {
        entry.writer.manager
        for entry in entries_of(body)
        if any(field_text(path) == field for path in entry.paths)
    }
