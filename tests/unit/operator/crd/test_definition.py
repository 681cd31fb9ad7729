"""The CustomResourceDefinition, and its copy in the chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    assert shown == [
        "Ready",
        "Reason",
        "Step",
        "ESS",
        "LR",
        "Warning",
        "Lag",
        "Rollouts",
        "Age",
    ]
