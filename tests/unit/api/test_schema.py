"""The JSON schema of a run is described, bounded and has defaults, as a cluster requires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vcpo.api import json_schema

SCHEMA = json_schema()
UNBOUNDED_BY_DESIGN = {
    # Pod templates are Kubernetes' own and checked there.
    "spec.learner.template",
    "spec.pods.template",
    "spec.rollouts[].template",
}


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    """The node with its reference followed; what stands beside the reference goes before."""
    name = node.get("$ref", "").removeprefix("#/$defs/")
    return {**SCHEMA["$defs"][name], **node} if name else node


def walk(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that a run may hold, by its path: `[]` is an item, `{}` a value of a map."""
    node = resolve(node)
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from walk(f"{path}.{name}" if path else name, inner)
    for inner in node.get("anyOf", []):
        yield from walk(path, inner)
    if "items" in node:
        yield from walk(f"{path}[]", node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(f"{path}{{}}", node["additionalProperties"])


def properties() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every property: its path, its name, its schema and the object that holds it."""
    for path, node in walk("", SCHEMA):
        for name, inner in node.get("properties", {}).items():
            yield f"{path}.{name}".strip("."), name, resolve(inner), node


def is_bounded(node: dict[str, Any]) -> bool:
    if {"const", "enum"} & node.keys():
        return True
    match node.get("type"):
        case "string":
            return "maxLength" in node
        case "array":
            return "maxItems" in node
        case "integer" | "number":
            lower = {"minimum", "exclusiveMinimum"} & node.keys()
            upper = {"maximum", "exclusiveMaximum"} & node.keys()
            return bool(lower and upper)
        case "object":
            return node.get("additionalProperties") is False or "maxProperties" in node
    return node.get("type") in {"boolean", "null"} or "anyOf" in node


def test_the_walk_reaches_the_leaves():
    paths = {path for path, _ in walk("", SCHEMA)}
    assert {"metadata.labels{}", "spec.rollouts[].maxReplicas", "spec.control.pollSeconds"} <= paths


def test_every_property_is_described():
    assert [path for path, _, node, _ in properties() if not node.get("description")] == []


def test_every_string_number_list_and_map_is_bounded():
    unbounded = {path for path, node in walk("", SCHEMA) if not is_bounded(node)}
    assert unbounded == UNBOUNDED_BY_DESIGN


def test_every_optional_property_has_a_default():
    missing = [
        path
        for path, name, node, owner in properties()
        if name not in owner.get("required", []) and "default" not in node
    ]
    assert missing == []


def test_only_name_model_environment_and_steps_must_be_given():
    required = [path for path, name, _, owner in properties() if name in owner.get("required", [])]
    assert sorted(required) == [
        "metadata",
        "metadata.name",
        "spec",
        "spec.environment",
        "spec.environment.name",
        "spec.environment.rewards[].name",
        "spec.model",
        "spec.model.cache.claimName",
        "spec.model.name",
        "spec.pods.extraEgress[].port",
        "spec.rollouts[].name",
        "spec.steps",
        "spec.tracking.sinks[].name",
    ]


def test_every_object_of_ours_is_closed():
    owners = {id(owner): owner for _, _, _, owner in properties()}
    assert all(owner["additionalProperties"] is False for owner in owners.values())


@pytest.mark.parametrize(
    ("path", "bounds"),
    [
        ("metadata.name", {"minLength": 1, "maxLength": 40}),
        ("spec.steps", {"minimum": 1, "maximum": 10_000_000}),
        ("spec.rollouts", {"minItems": 1, "maxItems": 8}),
        ("spec.algorithm.maxPolicyLagSteps", {"minimum": 0, "maximum": 1024, "default": 8}),
    ],
)
def test_bounds_are_those_of_the_model(path, bounds):
    node = dict(walk("", SCHEMA))[path]
    assert {key: node.get(key) for key in bounds} == bounds
