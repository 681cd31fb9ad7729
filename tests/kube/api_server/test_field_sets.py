from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.kubernetes.patching.field_sets import (
    from_fields_v1,
    leaves,
    merge,
    to_fields_v1,
    without,
)
from tests.fakes.kubernetes.patching.list_types import BuiltinLists

LISTS = BuiltinLists()
SCALARS = st.integers() | st.text(max_size=3) | st.booleans()
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("xyz"), "image": SCALARS}),
    unique_by=lambda container: container["name"],
    max_size=3,
)
PODS = st.fixed_dictionaries(
    {},
    optional={
        "containers": CONTAINERS,
        "labels": st.dictionaries(st.sampled_from("abc"), SCALARS, max_size=3),
        "args": st.lists(SCALARS, max_size=2),
    },
)
POD: dict[str, Any] = {
    "labels": {"app": "web"},
    "containers": [{"name": "c", "args": ["x"]}],
    "finalizers": ["f"],
}
POD_FIELDS = {
    "f:labels": {"f:app": {}},
    "f:containers": {'k:{"name":"c"}': {".": {}, "f:name": {}, "f:args": {}}},
    "f:finalizers": {'v:"f"': {}},
}


def test_fields_are_written_as_the_api_server_writes_them() -> None:
    assert to_fields_v1(leaves(POD, LISTS)) == POD_FIELDS


def test_a_missing_protocol_stands_for_tcp_in_a_port_s_key() -> None:
    found = leaves({"spec": {"ports": [{"port": 80}]}}, LISTS)
    assert ("f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}') in found


def test_a_selector_has_one_owner_as_a_whole() -> None:
    found = leaves({"spec": {"selector": {"matchLabels": {"a": "b"}}}}, LISTS)
    assert set(found) == {("f:spec", "f:selector")}


@given(PODS)
def test_fields_v1_reads_back_as_it_was_written(pod: dict[str, Any]) -> None:
    paths = frozenset(leaves(pod, LISTS)) - {()}
    assert from_fields_v1(to_fields_v1(paths)) == paths


@given(PODS, PODS)
def test_a_merge_states_everything_that_the_configuration_states(
    live: dict[str, Any], config: dict[str, Any]
) -> None:
    merged, stated = leaves(merge(live, config, LISTS), LISTS), leaves(config, LISTS)
    # An empty container in the configuration may be filled by what was there.
    assert all(merged[p] == value for p, value in stated.items() if p and value not in ({}, []))


@given(PODS)
def test_merging_a_document_into_itself_changes_nothing(pod: dict[str, Any]) -> None:
    assert merge(pod, pod, LISTS) == pod


def test_removing_the_last_field_removes_its_container() -> None:
    document = {"a": {"b": {"c": 1}}, "kept": {}}
    assert without(document, ("f:a", "f:b", "f:c"), LISTS) == {"kept": {}}
