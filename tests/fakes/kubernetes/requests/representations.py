"""The forms of a response: the object, its metadata only, or a Table.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.resources import Resource

_SEGMENT = re.compile(
    r"""\.(?P<field>(?:\\.|[^.\[\\])+)          # .name, with dots escaped
      | \[\?\(@\.(?P<key>[^=\s]+)\s*==\s*["'](?P<value>[^"']*)["']\)\]  # [?(@.type=="Ready")]
      | \['(?P<quoted>[^']+)'\]
      | \[(?P<index>\d+)\]""",
    re.VERBOSE,
)
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_BUILTIN_COLUMNS: dict[str, tuple[JsonObject, ...]] = {
    "Pod": (
        {"name": "Status", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Node", "type": "string", "jsonPath": ".spec.nodeName", "priority": 1},
    ),
    "Deployment": (
        {"name": "Ready", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Desired", "type": "integer", "jsonPath": ".spec.replicas"},
        {"name": "Up-to-date", "type": "integer", "jsonPath": ".status.updatedReplicas"},
    ),
    "StatefulSet": (
        {"name": "Ready", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Desired", "type": "integer", "jsonPath": ".spec.replicas"},
    ),
    "Service": ({"name": "Cluster-IP", "type": "string", "jsonPath": ".spec.clusterIP"},),
    "Namespace": ({"name": "Status", "type": "string", "jsonPath": ".status.phase"},),
    "Event": (
        {"name": "Type", "type": "string", "jsonPath": ".type"},
        {"name": "Reason", "type": "string", "jsonPath": ".reason"},
        {"name": "Message", "type": "string", "jsonPath": ".message"},
    ),
}


class Form(StrEnum):
    """How to show objects."""

    FULL = "full"
    METADATA = "metadata"
    TABLE = "table"


def form_of(accept: str) -> Form:
    """The first form of an Accept header that this server can give."""
    for media_type in accept.split(","):
        if "as=Table" in media_type:
            return Form.TABLE
        if "as=PartialObjectMetadata" in media_type:
            return Form.METADATA
    return Form.FULL


def json_path(body: Any, path: str) -> Any:
    """The value at a printer column's path, None when there is none."""
    for match in _SEGMENT.finditer(path):
        if field := match["field"] or match["quoted"]:
            body = body.get(field.replace("\\.", ".")) if isinstance(body, dict) else None
        elif not isinstance(body, list):
            return None
        elif match["index"]:
            index = int(match["index"])
            body = body[index] if index < len(body) else None
        else:
            items = (i for i in body if str(json_path(i, f".{match['key']}")) == match["value"])
            body = next(items, None)
    return body


def columns_of(resource: Resource) -> tuple[JsonObject, ...]:
    """The printer columns of a resource, name first."""
    own = resource.columns or (*_BUILTIN_COLUMNS.get(resource.kind, ()), _AGE)
    return ({"name": "Name", "type": "string", "jsonPath": ".metadata.name"}, *own)


def table(
    resource: Resource, bodies: Sequence[JsonObject], metadata: JsonObject, now: datetime
) -> JsonObject:
    """Objects as a Table, each row with its object's metadata."""
    columns = columns_of(resource)
    definitions = [
        {
            "name": column["name"],
            "type": column["type"],
            "format": "name" if column["name"] == "Name" else column.get("format", ""),
            "description": column.get("description", ""),
            "priority": column.get("priority", 0),
        }
        for column in columns
    ]
    rows = [
        {"cells": [_cell(column, body, now) for column in columns], "object": metadata_only(body)}
        for body in bodies
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions,
        "rows": rows,
    }


def metadata_only(body: JsonObject) -> JsonObject:
    """An object without all but its metadata."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": body["metadata"],
    }


def object_list(
    resource: Resource, bodies: Sequence[JsonObject], metadata: JsonObject, form: Form
) -> JsonObject:
    """Objects as a list of their kind, or of metadata."""
    kind, api_version = f"{resource.kind}List", resource.api_version
    show: Callable[[JsonObject], JsonObject] = dict
    if form is Form.METADATA:
        kind, api_version, show = "PartialObjectMetadataList", "meta.k8s.io/v1", metadata_only
    items = [show(body) for body in bodies]
    return {"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items}


def represent(resource: Resource, body: JsonObject, form: Form, now: datetime) -> JsonObject:
    """One object in the form asked for."""
    if form is Form.FULL or body.get("kind") == "Scale":
        return body
    if form is Form.METADATA:
        return metadata_only(body)
    return table(resource, [body], {"resourceVersion": body["metadata"]["resourceVersion"]}, now)


def _cell(column: JsonObject, body: JsonObject, now: datetime) -> Any:
    value = json_path(body, column["jsonPath"])
    if column["type"] == "date" and value is not None:
        since = datetime.fromisoformat(str(value)).astimezone(UTC)
        return human_duration((now - since).total_seconds())
    return value


def human_duration(seconds: float) -> str:
    """A duration in the largest unit that kubectl would use for it: 45s, 12m, 5h, 3d."""
    for unit, length_s in (("d", 86400 * 2), ("h", 3600 * 3), ("m", 60 * 2)):
        if seconds >= length_s:
            size = {"d": 86400, "h": 3600, "m": 60}[unit]
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
