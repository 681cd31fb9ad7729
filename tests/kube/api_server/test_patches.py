from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.kubernetes.errors import ApiError
from tests.fakes.kubernetes.patching.patches import json_patch, merge_patch, strategic_merge

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_rfc_7386_hold(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, patch) == result


@given(DOCUMENTS, DOCUMENTS)
def test_a_merge_patch_twice_is_the_same_as_once(target: Any, patch: Any) -> None:
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once


def test_json_patch_operations_see_what_came_before() -> None:
    operations: list[dict[str, Any]] = [
        {"op": "add", "path": "/list", "value": [1, 3]},
        {"op": "add", "path": "/list/1", "value": 2},
        {"op": "add", "path": "/list/-", "value": 4},
        {"op": "move", "from": "/a~1b", "path": "/moved"},
        {"op": "copy", "from": "/list/0", "path": "/first"},
        {"op": "remove", "path": "/gone"},
    ]
    patched = json_patch({"a/b": True, "gone": 0}, operations)
    assert patched == {"list": [1, 2, 3, 4], "moved": True, "first": 1}


def test_a_json_patch_leaves_the_old_document_alone() -> None:
    document = {"a": {"b": 1}}
    json_patch(document, [{"op": "replace", "path": "/a/b", "value": 2}])
    assert document == {"a": {"b": 1}}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": 2},
        {"op": "remove", "path": "/absent"},
        {"op": "replace", "path": "/absent", "value": 1},
        {"op": "add", "path": "/absent/x", "value": 1},
        {"op": "shuffle", "path": "/a"},
    ],
    ids=lambda operation: f"{operation['op']} {operation['path']}",
)
def test_an_impossible_operation_is_refused(operation: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refusal:
        json_patch({"a": 1}, [operation])
    assert refusal.value.code == 422


def test_a_strategic_patch_deletes_an_item_by_its_key() -> None:
    pod = {"containers": [{"name": "a"}, {"name": "b"}]}
    patch = {"containers": [{"name": "a", "$patch": "delete"}]}
    assert strategic_merge(pod, patch) == {"containers": [{"name": "b"}]}


def test_a_strategic_patch_replaces_lists_without_a_key() -> None:
    container = {"command": ["old", "words"]}
    assert strategic_merge(container, {"command": ["new"]}) == {"command": ["new"]}


def test_a_strategic_patch_adds_finalizers_to_those_that_are_there() -> None:
    patched = strategic_merge({"finalizers": ["a"]}, {"finalizers": ["b", "a"]})
    assert patched == {"finalizers": ["a", "b"]}
