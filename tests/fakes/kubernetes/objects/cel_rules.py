"""CEL rules of custom resources: `x-kubernetes-validations` at every level of the schema.

Departures: none of the Kubernetes extension libraries (`quantity`, `url`, ...), no cost limit.
A rule that uses them fails here with a message that says so, rather than passing unseen.
Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import cel

from tests.fakes.kubernetes.errors import Cause, JsonObject

_OLD_SELF = re.compile(r"\boldSelf\b")
_REASONS = {
    "FieldValueInvalid": "Invalid value",
    "FieldValueForbidden": "Forbidden",
    "FieldValueRequired": "Required value",
    "FieldValueDuplicate": "Duplicate value",
}


@functools.cache
def _program(rule: str) -> cel.Program:
    return cel.compile(rule)


def unreadable(schema: JsonObject, path: str) -> Iterator[Cause]:
    """The rules of a schema that are not CEL, for the CRD's own validation."""
    for index, rule in enumerate(schema.get("x-kubernetes-validations") or ()):
        try:
            _program(rule["rule"])
        except ValueError as mistake:
            yield Cause(
                field=f"{path}.x-kubernetes-validations[{index}].rule",
                message=f"Invalid value: {rule['rule']!r}: compilation failed: {mistake}",
            )
    for field, child in (schema.get("properties") or {}).items():
        yield from unreadable(child, f"{path}.properties[{field}]")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from unreadable(schema[key], f"{path}.{key}")


def violations(
    schema: JsonObject, value: Any, old: Any = None, path: str = "", *, root: bool = True
) -> Iterator[Cause]:
    """Every rule that value breaks; rules on `oldSelf` only run where there is an old value.

    root: whether value is a whole object, of whose metadata CEL sees only the names.
    """
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations") or ():
        yield from _check(rule, _visible(value, root=root), _visible(old, root=root), path)
    if isinstance(value, dict):
        yield from _in_fields(schema, value, old if isinstance(old, dict) else {}, path)
    if isinstance(value, list) and schema.get("items"):
        for index, item in enumerate(value):
            before = _correlate(schema, item, old if isinstance(old, list) else [])
            yield from violations(schema["items"], item, before, f"{path}[{index}]", root=False)


def _in_fields(
    schema: JsonObject, value: JsonObject, old: JsonObject, path: str
) -> Iterator[Cause]:
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    for field, child in value.items():
        known = properties.get(field, extra)
        if isinstance(known, dict):
            place = f"{path}.{field}" if path else field
            yield from violations(known, child, old.get(field), place, root=False)


def _visible(value: Any, *, root: bool) -> Any:
    if not root or not isinstance(value, dict) or "metadata" not in value:
        return value
    named = {k: v for k, v in value["metadata"].items() if k in ("name", "generateName")}
    return {**value, "metadata": named}


def _correlate(schema: JsonObject, item: Any, old: list[Any]) -> Any:
    """The earlier form of an item: only items of keyed lists have one."""
    if schema.get("x-kubernetes-list-type") != "map" or not isinstance(item, dict):
        return None
    keys = schema["x-kubernetes-list-map-keys"]
    same = (o for o in old if all(o.get(key) == item.get(key) for key in keys))
    return next(same, None)


def _check(rule: JsonObject, value: Any, old: Any, path: str) -> Iterator[Cause]:
    if old is None and _OLD_SELF.search(rule["rule"]) and not rule.get("optionalOldSelf"):
        return
    try:
        holds = _program(rule["rule"]).execute({"self": value, "oldSelf": old})
    except (KeyError, TypeError, ValueError, RuntimeError) as mistake:
        yield Cause(field=path, message=f"Invalid value: rule {rule['rule']!r} failed: {mistake}")
        return
    if holds is not True:
        reason = rule.get("reason", "FieldValueInvalid")
        place = path + rule.get("fieldPath", "") if path else rule.get("fieldPath", "")[1:]
        subject = f": {_brief(value)}" if reason == "FieldValueInvalid" else ""
        message = f"{_REASONS[reason]}{subject}: {_message(rule, value, old)}"
        yield Cause(field=place or "<nil>", message=message, reason=reason)


def _message(rule: JsonObject, value: Any, old: Any) -> str:
    if "messageExpression" in rule:
        return str(_program(rule["messageExpression"]).execute({"self": value, "oldSelf": old}))
    return str(rule.get("message") or f"failed rule: {rule['rule']}")


def _brief(value: Any) -> str:
    if isinstance(value, dict | list):
        return '"object"' if isinstance(value, dict) else '"array"'
    return repr(value).replace("'", '"')
