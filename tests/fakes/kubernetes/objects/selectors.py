"""Label selectors, as text in a query.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
"""

import re
from collections.abc import Callable, Mapping

from tests.fakes.kubernetes.errors import JsonObject, bad_request

Matcher = Callable[[JsonObject], bool]

_TERM = re.compile(r"^(?P<key>[A-Za-z0-9./_-]+)(==?(?P<value>[A-Za-z0-9._-]*))?$")


def labels_of(body: JsonObject) -> Mapping[str, str]:
    """The labels of an object, empty when it has none."""
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels


def label_matcher(selector: str) -> Matcher:
    """A test for labels that exist or have a value; an empty selector matches everything.

    Departure: a real server knows sets and negations too.
    """
    tests = [_label_test(term.strip()) for term in selector.split(",") if term.strip()]
    return lambda body: all(test(labels_of(body)) for test in tests)


def _label_test(term: str) -> Callable[[Mapping[str, str]], bool]:
    if (match := _TERM.match(term)) is None:
        raise bad_request(f"unable to parse requirement: {term!r} is not a label selector")
    key, value = match["key"], match["value"]
    return lambda labels: key in labels and value in {None, labels[key]}
