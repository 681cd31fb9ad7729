"""Label and field selectors, as text in a query and as `LabelSelector` objects.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tests.fakes.kubernetes.errors import JsonObject, bad_request

Matcher = Callable[[JsonObject], bool]

_SET = re.compile(r"^(?P<key>\S+)\s+(?P<operator>in|notin)\s*\((?P<values>[^)]*)\)$")
_EQUAL = re.compile(r"^(?P<key>[^=!\s]+)\s*(?P<operator>==?|!=)\s*(?P<value>\S*)$")
_KEY = re.compile(r"^!?\s*[A-Za-z0-9./_-]+$")


def labels_of(body: JsonObject) -> Mapping[str, str]:
    """The labels of an object, empty when it has none."""
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels


def label_matcher(selector: str) -> Matcher:
    """A test for a textual label selector; an empty one matches everything.

    Raises:
        ApiError: 400 when the selector cannot be read.
    """
    terms = [term.strip() for term in re.split(r",(?![^()]*\))", selector) if term.strip()]
    tests = [_label_test(term) for term in terms]
    return lambda body: all(test(labels_of(body)) for test in tests)


def _label_test(term: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET.match(term):
        values = {value.strip() for value in match["values"].split(",")}
        return _membership(match["key"], match["operator"] == "in", values)
    if match := _EQUAL.match(term):
        return _membership(match["key"], match["operator"] != "!=", {match["value"]})
    if not _KEY.match(term):
        raise bad_request(f"unable to parse requirement: {term!r} is not a label selector")
    key = term.removeprefix("!").strip()
    wanted = not term.startswith("!")
    return lambda labels: (key in labels) is wanted


def _membership(key: str, wanted: bool, values: set[str]) -> Callable[[Mapping[str, str]], bool]:
    """`in` needs the key; `notin` and `!=` also match objects without it."""
    return lambda labels: (labels.get(key) in values) is wanted


def matches_selector(selector: JsonObject, labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy a `LabelSelector` object; an empty one matches everything."""
    required = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in required.items()):
        return False
    return all(
        _expression_holds(expression, labels)
        for expression in selector.get("matchExpressions") or ()
    )


def _expression_holds(expression: JsonObject, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], set(expression.get("values") or ())
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def field_matcher(selector: str) -> Matcher:
    """A test for a field selector: `path=value` or `path!=value`, joined by commas.

    Departure: any path may be asked for; a real server knows a few for each kind.
    """
    tests = [_field_test(term.strip()) for term in selector.split(",") if term.strip()]
    return lambda body: all(test(body) for test in tests)


def _field_test(term: str) -> Matcher:
    match = _EQUAL.match(term)
    if match is None:
        raise bad_request(f"invalid field selector: {term!r} is not path=value")
    path = match["key"].split(".")
    wanted = match["operator"] != "!="
    value = match["value"]
    return lambda body: (_field_text(body, path) == value) is wanted


def _field_text(body: JsonObject, path: list[str]) -> str:
    found: object = body
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return "" if found is None else str(found)
