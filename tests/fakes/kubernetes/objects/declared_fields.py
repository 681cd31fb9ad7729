"""The fields that the kinds of Kubernetes have, by its published schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.resources import Resource

_FOLDER = "kubernetes-json-schema/v1.37.0-local"


def undeclared(resource: Resource, body: JsonObject) -> Iterator[str]:
    """The paths below body that its kind does not have, such as `.spec.replicsa`."""
    group, _, version = resource.api_version.rpartition("/")
    name = f"io.k8s.api.{group.partition('.')[0] or 'core'}.{version}.{resource.kind}"
    if name in _definitions():
        yield from _undeclared({"$ref": name}, body, "")


@functools.cache
def _definitions() -> dict[str, JsonObject]:
    file = resources.files("kubernetes_validate") / _FOLDER / "_definitions.json"
    found: dict[str, JsonObject] = json.loads(file.read_text())["$defs"]
    return found


def _undeclared(node: JsonObject, value: Any, path: str) -> Iterator[str]:
    if "$ref" in node:
        node = _definitions().get(node["$ref"].rpartition("/")[2], {})
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _undeclared(node.get("items", {}), item, f"{path}[{_key(item, index)}]")
    properties = node.get("properties")
    for name, child in value.items() if isinstance(value, dict) else ():
        if properties and name not in properties:
            yield f"{path}.{name}"
        elif properties:
            yield from _undeclared(properties[name], child, f"{path}.{name}")


def _key(item: Any, index: int) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return str(index) if name is None else f"name={json.dumps(name)}"
