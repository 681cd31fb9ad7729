"""The CustomResourceDefinition, and its copy in the chart."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from vcpo_operator.crd import run_crd, to_yaml
from vcpo_operator.crd.structural import structural

COMMITTED = Path(__file__).parents[4] / "charts/vcpo/files/run.crd.yaml"
VERSION = run_crd()["spec"]["versions"][0]
SPEC = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


def test_the_chart_carries_the_definition_of_this_code():
    assert COMMITTED.read_text() == to_yaml(run_crd()), (
        "run: python -m vcpo_operator.crd > charts/vcpo/files/run.crd.yaml"
    )


def test_the_definition_is_small_enough_to_be_applied_by_any_client():
    # A client-side apply keeps the whole object in an annotation; all annotations hold 256 KiB.
    assert len(json.dumps(run_crd()).encode()) < 128 * 1024


def test_explain_shows_every_default_of_a_field():
    def undescribed(node: dict[str, Any], path: str) -> Iterator[str]:
        default = node.get("default")
        if default not in (None, {}, []):
            shown = default if isinstance(default, str) else json.dumps(default)
            if not node["description"].endswith(f"Default: {shown}."):
                yield path
        for name, field in node.get("properties", {}).items():
            yield from undescribed(field, f"{path}.{name}")
        if "items" in node:
            yield from undescribed(node["items"], f"{path}[]")

    schema = run_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert list(undescribed(schema, "")) == []
    steps = schema["properties"]["spec"]["properties"]["checkpoint"]["properties"]["everySteps"]
    assert steps["description"].endswith("Default: 50.")


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_knows_every_field_of_the_definition(version: str):
    kubernetes_validate.validate(run_crd(), version, strict=True)


def test_the_default_group_is_named_and_nothing_else():
    assert SPEC["rollouts"]["default"] == [{"name": "main"}]


def test_only_parameters_arguments_and_our_own_state_are_open():
    schema = VERSION["schema"]["openAPIV3Schema"]
    assert sorted(open_paths(schema)) == [
        "spec.environment.parameters",
        "spec.environment.rewards.parameters",
        "spec.environment.templateArguments",
        "spec.rollouts.engineArguments",
        "spec.tracking.sinks.parameters",
        "status.control",
    ]


def open_paths(schema, path=""):
    if path.endswith(".template"):
        return
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        yield path.removeprefix(".")
    for name, field in schema.get("properties", {}).items():
        yield from open_paths(field, f"{path}.{name}")
    if "items" in schema:
        yield from open_paths(schema["items"], path)


def test_a_field_without_a_type_is_refused():
    with pytest.raises(ValueError, match="needs a type"):
        structural({"properties": {"x": {"description": "any"}}})


def test_the_columns_say_what_an_operator_on_call_asks_first():
    shown = [each["name"] for each in VERSION["additionalPrinterColumns"] if "priority" not in each]
    assert shown == ["Ready", "Reason", "Step", "ESS", "LR", "Warning", "Lag", "Rollouts", "Age"]


Node = dict[str, Any]
Rule = Callable[[str, Node], bool]
"""Whether a node at a path (`spec.rollouts[].name`) keeps to the convention."""


def nodes(schema: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, schema
    if path.endswith(".template"):
        return  # Kubernetes' own fields
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}".removeprefix("."))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


SCHEMA: Node = run_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NODES = [each for each in nodes(SCHEMA) if each[0].startswith(("spec", "status"))]
SECTIONS = {"spec.model", "spec.environment", "spec"}
"""Fields described by the type that they have."""
BOOLEANS = {
    "spec.suspend",
    "spec.algorithm.routerReplay",
    "spec.environment.plainControlTokens",
    "spec.health.enabled",
    "spec.model.trustRemoteCode",
    "spec.pods.podMonitor",
    "spec.tracking.sinks[].samples",
}
"""Fields that can never want a third value."""


def has_one_type(path: str, node: Node) -> bool:
    alternatives = {"anyOf", "oneOf", "allOf", "$ref", "title", "const"} & set(node)
    types = {"string", "integer", "number", "boolean", "object", "array"}
    return node["type"] in types and not alternatives


def has_a_sentence(path: str, node: Node) -> bool:
    exempt = path.endswith("[]") or path in SECTIONS
    return exempt or bool(re.match(r"[`A-Z0-9].*\.$", node.get("description", "")))


def bounds_its_string(path: str, node: Node) -> bool:
    return node["type"] != "string" or bool({"maxLength", "enum", "format"} & set(node))


def bounds_its_integer_on_both_sides(path: str, node: Node) -> bool:
    return node["type"] != "integer" or {"minimum", "maximum"} <= set(node)


def bounds_its_list_and_says_how_it_merges(path: str, node: Node) -> bool:
    return node["type"] != "array" or {"maxItems", "x-kubernetes-list-type"} <= set(node)


def is_a_boolean_on_purpose(path: str, node: Node) -> bool:
    return node["type"] != "boolean" or path in BOOLEANS


def is_named_in_camel_case_without_phase_or_duration(path: str, node: Node) -> bool:
    name = path.rpartition(".")[2].removesuffix("[]")
    banned = name in {"phase", "state"} or re.search(r"(Duration|Timeout|Interval)$", name)
    return bool(re.fullmatch(r"[a-z][A-Za-z0-9]*", name)) and not banned


def is_called_time_only_as_a_time_of_day(path: str, node: Node) -> bool:
    return path.endswith(("Time", ".time")) == (node.get("format") == "date-time")


@pytest.mark.parametrize(
    "rule",
    [
        has_one_type,
        has_a_sentence,
        bounds_its_string,
        bounds_its_integer_on_both_sides,
        bounds_its_list_and_says_how_it_merges,
        is_a_boolean_on_purpose,
        is_named_in_camel_case_without_phase_or_duration,
        is_called_time_only_as_a_time_of_day,
    ],
)
def test_every_node(rule: Rule):
    assert len(NODES) > 100
    assert [path for path, node in NODES if not rule(path, node)] == []


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
