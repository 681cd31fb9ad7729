"""The API conventions of Kubernetes, as rules over every node of the definition.

Rules after kube-api-linter: comments, bounds, list types, names, conditions. One departure, on
purpose: real-valued hyper-parameters are numbers, as every training tool writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from vcpo_operator.crd import DEFINITIONS, crd

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SCHEMAS = {
    name: make()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name, make in DEFINITIONS.items()
}
BOOLEANS = {"spec.suspend", "spec.pods.disruptionBudgets", "spec.pods.podMonitor"}
"""Fields that can never want a third value."""


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}".removeprefix("."))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


ALL = [
    pytest.param(path, node, id=f"{name}:{path}")
    for name, schema in SCHEMAS.items()
    for path, node in nodes(schema)
    if path and path != "metadata"
]
every_node = pytest.mark.parametrize(("path", "node"), ALL)
OURS = [each for each in ALL if str(each.values[0]).startswith(("spec", "status"))]
every_own_node = pytest.mark.parametrize(("path", "node"), OURS)


@every_node
def test_every_node_has_one_type_and_no_alternatives(path: str, node: dict[str, Any]):
    assert node["type"] in {"string", "integer", "number", "boolean", "object", "array"}
    assert not {"anyOf", "oneOf", "allOf", "$ref", "title", "const"} & set(node)


@every_own_node
def test_every_field_has_a_sentence(path: str, node: dict[str, Any]):
    if not path.endswith("[]") and path not in SECTIONS:
        assert re.match(r"[`A-Z0-9].*\.$", node.get("description", "")), path


SECTIONS = {"spec.model", "spec.environment", "spec"}
"""Described by the type they have."""


@every_own_node
def test_every_string_is_bounded(path: str, node: dict[str, Any]):
    if node["type"] == "string":
        assert {"maxLength", "enum", "format"} & set(node), path


@every_own_node
def test_every_integer_is_bounded_on_both_sides(path: str, node: dict[str, Any]):
    if node["type"] == "integer":
        assert {"minimum", "maximum"} <= set(node), path


@every_own_node
def test_every_list_is_bounded_and_says_how_it_merges(path: str, node: dict[str, Any]):
    if node["type"] == "array":
        assert {"maxItems", "x-kubernetes-list-type"} <= set(node), path


@every_own_node
def test_every_boolean_was_thought_about(path: str, node: dict[str, Any]):
    assert node["type"] != "boolean" or path in BOOLEANS


@every_own_node
def test_names_are_camel_case_without_phase_or_duration(path: str, node: dict[str, Any]):
    name = path.rpartition(".")[2].removesuffix("[]")
    assert re.fullmatch(r"[a-z][A-Za-z0-9]*", name)
    assert name not in {"phase", "state"}
    assert not re.search(r"(Duration|Timeout|Interval)$", name)


@every_own_node
def test_only_times_of_day_are_called_time(path: str, node: dict[str, Any]):
    assert path.endswith("Time") == (node.get("format") == "date-time")


def test_conditions_have_the_shape_that_kubectl_wait_knows():
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert set(conditions["items"]["properties"]) == {
        "type",
        "status",
        "reason",
        "message",
        "lastTransitionTime",
        "observedGeneration",
    }


def test_nothing_in_a_status_is_required_at_its_top():
    assert "required" not in SCHEMA["properties"]["status"]


def test_a_run_needs_what_has_no_default_and_nothing_else():
    spec = SCHEMA["properties"]["spec"]
    without = {name for name, field in spec["properties"].items() if "default" not in field}
    assert set(spec["required"]) == {"model", "environment", "steps"} <= without
