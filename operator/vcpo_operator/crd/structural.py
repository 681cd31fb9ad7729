"""Converting pydantic's JSON schema (draft 2020-12) to a structural schema of Kubernetes.

A structural schema has a type at every node, no references and no alternatives. So references are
replaced by what they refer to. An optional field (`anyOf` with null) becomes the field itself, not
required. The default of a section becomes `{}`: the API server then fills in the defaults of its
fields one by one, also when the user set some of them.

Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

import json
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_COPIED = (
    *("type", "description", "enum", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "minItems", "maxItems", "maxProperties"),
)
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_FORMATS = {"integer": "int64", "number": "double"}


def structural(schema: Mapping[str, Any]) -> Schema:
    """Return the structural schema of a document."""
    return _node(schema, schema.get("$defs", {}))


def _node(source: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    source = _resolve(source, definitions)
    if "type" not in source:
        raise ValueError(f"a structural schema needs a type here: {source}")
    node: Schema = {name: source[name] for name in _COPIED if name in source}
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    for name, bound in _EXCLUSIVE.items():
        if name in source:
            node |= {bound: source[name], name: True}
    if node["type"] in _FORMATS and "enum" not in node:
        node["format"] = _FORMATS[node["type"]]
    if "const" in source:
        node["enum"] = [source["const"]]
    if node["type"] == "array":
        node |= _array(source, definitions)
    if node["type"] == "object":
        node |= _object(source, definitions)
    if source.get("default") is not None:
        return _with_default(node, source["default"])
    return node


def _with_default(node: Schema, default: Any) -> Schema:
    """Return the node with its default, also in its description: `kubectl explain` shows that.

    A section's default is empty, and items of a list lack fields with a default of their own.
    """
    if node["type"] == "object":
        default = {}
    elif node["type"] == "array":
        default = [_without_defaults(node["items"], item) for item in default]
    if default in ({}, []):
        return {**node, "default": default}
    shown = default if isinstance(default, str) else json.dumps(default)
    said = f"{node.get('description', '')} Default: {shown}."
    return {**node, "description": said.lstrip(), "default": default}


def _resolve(source: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node without references and null; outer attributes replace inner ones."""
    outer = dict(source)
    while "$ref" in outer or "anyOf" in outer:
        if "$ref" in outer:
            inner = definitions[outer.pop("$ref").rpartition("/")[2]]
        else:
            (inner,) = [each for each in outer.pop("anyOf") if each.get("type") != "null"]
        outer = {**inner, **outer}
    return outer


def _array(source: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    list_type = source.get("x-kubernetes-list-type", "atomic")
    parts: Schema = {
        "items": _node(source["items"], definitions),
        "x-kubernetes-list-type": list_type,
    }
    if list_type == "map":
        parts["x-kubernetes-list-map-keys"] = source.get("x-kubernetes-list-map-keys", ["name"])
    return parts


def _object(source: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    values = source.get("additionalProperties")
    if "properties" in source:
        parts: Schema = {
            "properties": {
                name: _node(field, definitions) for name, field in source["properties"].items()
            }
        }
        return parts | ({"required": source["required"]} if "required" in source else {})
    if isinstance(values, Mapping) and values:
        return {"additionalProperties": _node(values, definitions)}
    return {"x-kubernetes-preserve-unknown-fields": True}


def _without_defaults(items: Schema, item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    fields = items["properties"]
    return {
        name: value
        for name, value in item.items()
        if value is not None and "default" not in fields[name]
    }
