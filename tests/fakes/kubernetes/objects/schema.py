"""Structural schemas of custom resources: pruning, defaults and validation.

The order is the API server's: prune what the schema does not know, drop nulls that are not
allowed, fill in defaults, validate, then the CEL rules.
Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema

from tests.fakes.kubernetes.errors import Cause, JsonObject
from tests.fakes.kubernetes.objects import cel_rules

_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_OBJECT_FIELDS = ("apiVersion", "kind", "metadata")
_ROOT = {"properties": {field: {_PRESERVE: True} for field in _OBJECT_FIELDS}}


def _child(schema: JsonObject, field: str) -> JsonObject | None:
    """The schema of a field, None when the field is unknown."""
    properties = schema.get("properties") or {}
    if field in properties:
        found: JsonObject = properties[field]
        return found
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        return extra
    return {_PRESERVE: True} if extra is True or schema.get(_PRESERVE) else None


def prune(schema: JsonObject, body: JsonObject) -> JsonObject:
    """body without what schema does not know."""
    properties = {**(schema.get("properties") or {}), **_ROOT["properties"]}
    pruned: JsonObject = _prune({**schema, "properties": properties}, body)
    return pruned


def _prune(schema: JsonObject, value: Any) -> Any:
    if isinstance(value, list):
        items = schema.get("items") or {_PRESERVE: True}
        return [_prune(items, item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {field: _child(schema, field) for field in value}
    return {
        field: _prune(below, value[field]) for field, below in known.items() if below is not None
    }


def apply_defaults(schema: JsonObject, value: Any) -> Any:
    """value with the defaults of schema for all that is absent."""
    if isinstance(value, list):
        items = schema.get("items")
        return [apply_defaults(items, item) for item in value] if items else value
    if not isinstance(value, dict):
        return value
    filled = {}
    for field, child in value.items():
        known = _child(schema, field)
        if known is None:
            filled[field] = child
        elif child is not None or known.get("nullable") or known.get(_PRESERVE):
            filled[field] = apply_defaults(known, child)
    for field, known in (schema.get("properties") or {}).items():
        if field not in filled and "default" in known:
            filled[field] = apply_defaults(known, copy.deepcopy(known["default"]))
    return filled


def to_json_schema(schema: JsonObject) -> JsonObject:
    """The same rules for a JSON Schema validator of draft 4, which OpenAPI 3.0 descends from."""
    plain: JsonObject = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            plain[key] = {field: to_json_schema(child) for field, child in value.items()}
        elif key in ("allOf", "anyOf", "oneOf"):
            plain[key] = [to_json_schema(child) for child in value]
        elif isinstance(value, dict) and key in ("items", "additionalProperties", "not"):
            plain[key] = to_json_schema(value)
        elif not key.startswith("x-") and key not in ("default", "example", "format", "nullable"):
            plain[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        plain["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in plain:
        types = plain["type"]
        plain["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    return plain


class Schema:
    """A structural schema, with its validator made once. document: as the CRD states it."""

    def __init__(self, document: JsonObject) -> None:
        self.document = document
        self._validator = jsonschema.Draft4Validator(to_json_schema(document))

    def prune(self, body: JsonObject) -> JsonObject:
        return prune(self.document, body)

    def apply_defaults(self, body: JsonObject) -> JsonObject:
        filled: JsonObject = apply_defaults(self.document, body)
        return filled

    def violations(self, body: JsonObject, old: JsonObject | None) -> list[Cause]:
        """Every broken rule: the schema's, then, if it holds, the CEL rules on top of it.

        old: what body replaces, None when it is new.
        """
        errors = sorted(self._validator.iter_errors(body), key=lambda e: [str(p) for p in e.path])
        found = dict.fromkeys(cause for error in errors for cause in _causes(error))
        broken = [*found, *_duplicates(self.document, body, "")]
        return broken or list(cel_rules.violations(self.document, body, old))


def _causes(error: jsonschema.ValidationError) -> Iterator[Cause]:
    path, rule = path_text(error.absolute_path), str(error.validator)
    body: Any = error.instance
    value, limit = json.dumps(body), json.dumps(error.validator_value)
    if rule == "required":
        for field in json.loads(limit):
            if field not in body:
                place = f"{path}.{field}" if path else field
                yield Cause(field=place, message="Required value", reason="FieldValueRequired")
        return
    if rule == "enum":
        allowed = ", ".join(json.dumps(choice) for choice in json.loads(limit))
        message = f"Unsupported value: {value}: supported values: {allowed}"
        yield Cause(field=path, message=message, reason="FieldValueNotSupported")
    elif rule == "type":
        message = f"Invalid value: {value}: {path} in body must be of type {limit}"
        yield Cause(field=path, message=message, reason="FieldValueTypeInvalid")
    else:
        message = f"Invalid value: {value}: {path} in body breaks {rule} {limit}"
        yield Cause(field=path, message=message)


def path_text(parts: Any) -> str:
    """A document path as Kubernetes writes it: `spec.rollouts[0].name`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _duplicates(schema: JsonObject, value: Any, path: str) -> Iterator[Cause]:
    if isinstance(value, dict):
        for field, child in value.items():
            place = f"{path}.{field}" if path else field
            yield from _duplicates(_child(schema, field) or {}, child, place)
    if not isinstance(value, list):
        return
    seen = []
    for index, item in enumerate(value):
        identity = _identity(schema, item)
        if identity is not None and identity in seen:
            yield Cause(
                field=f"{path}[{index}]",
                message=f"Duplicate value: {json.dumps(identity)}",
                reason="FieldValueDuplicate",
            )
        seen.append(identity)
        yield from _duplicates(schema.get("items") or {}, item, f"{path}[{index}]")


def _identity(schema: JsonObject, item: Any) -> Any:
    match schema.get("x-kubernetes-list-type"):
        case "map" if isinstance(item, dict):
            return {key: item.get(key) for key in schema["x-kubernetes-list-map-keys"]}
        case "set":
            return item
        case _:
            return None
