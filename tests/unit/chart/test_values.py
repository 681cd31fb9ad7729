"""Each value is explained, is used, has a schema, and a wrong one is refused with its path."""

import json
import re
from typing import Any

import helm_python
import pytest

from tests.fixtures.chart.rendering import (
    CHART,
    Values,
    chart,
    default_values,
    leaves,
    render_files,
)

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else schema


def schema_paths(schema: dict[str, Any], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of a schema's leaves: what has no properties of its own."""
    properties = resolve(schema).get("properties")
    if not properties:
        return {path}
    return {leaf for key in properties for leaf in schema_paths(properties[key], (*path, key))}


def objects_with_fields(schema: dict[str, Any]) -> list[dict[str, Any]]:
    schema = resolve(schema)
    below = [o for each in schema.get("properties", {}).values() for o in objects_with_fields(each)]
    return [schema, *below] if "properties" in schema else below


PASSED_ON = (
    *(("resources",), ("affinity",), ("podSecurityContext",)),
    ("metrics", "dashboards", "labels"),
)
"""Values that reach an object as they are; their keys are Kubernetes' own, or the user's."""


def whole(paths: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {next((each for each in PASSED_ON if path[: len(each)] == each), path) for path in paths}


def value_paths() -> set[tuple[str, ...]]:
    return whole({path for path, _ in leaves(default_values())})


def test_values_and_schema_name_the_same_fields():
    assert whole(schema_paths(SCHEMA)) - {("global",)} == value_paths()


def test_no_object_of_the_schema_takes_an_unknown_field():
    assert [
        o for o in objects_with_fields(SCHEMA) if o.get("additionalProperties") is not False
    ] == []


WRONG: dict[str, tuple[Values, str]] = {
    "unknown field below": ({"metrics": {"serviceMonitor": {"scrape": "1s"}}}, "scrape"),
    "misspelt unit": ({"resources": {"limits": {"memory": "1Gb"}}}, "/resources/limits/memory"),
    "registry with a scheme": (
        {"images": {"registry": "https://registry.example.com"}},
        "/registry",
    ),
    "misspelt variable": ({"extraEnv": [{"name": "A", "valu": "b"}]}, "valu"),
    "misspelt peer": ({"networkPolicy": {"metricsFrom": [{"podselector": {}}]}}, "podselector"),
    "number as text": ({"prometheus": {"podPort": "2"}}, "/prometheus/podPort"),
    "word outside its set": ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
    "digest without its kind": ({"images": {"operator": {"digest": "abc"}}}, "/digest"),
    "upper-case namespace": ({"watchNamespaces": ["Team"]}, "/watchNamespaces/0"),
    "namespace twice": ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces"),
    "port out of range": ({"networkPolicy": {"apiServer": {"ports": [0]}}}, "/ports/0"),
    "address without a mask": ({"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1"]}}}, "/cidrs"),
    "address without a scheme": ({"prometheus": {"url": "prometheus:9090"}}, "/prometheus/url"),
    "address with a password": ({"prometheus": {"url": "http://me:secret@prometheus"}}, "/url"),
    "interval without a unit": ({"metrics": {"podMonitor": {"interval": "30"}}}, "/interval"),
}


@pytest.mark.parametrize(("values", "named"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_value_is_refused_by_its_path(values, named):
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(named)):
        chart().validate_schema(values)


@pytest.mark.parametrize(
    "registry",
    ["", "ghcr.io/me", "localhost:5000", "registry.example.com:5000/ml/vcpo", "10.0.0.1"],
)
def test_a_registry_is_a_host_with_a_port_and_a_path(registry):
    chart().validate_schema({"images": {"registry": registry}})


def nulls(tree: Values) -> Values:
    """The same sections, in which no value is set."""
    return {key: nulls(value) if isinstance(value, dict) else None for key, value in tree.items()}


def test_a_value_that_the_release_of_an_older_chart_lacks_is_the_charts():
    monitors = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    metrics = {"metrics": {name: {"enabled": True} for name in monitors}}
    expected = render_files(metrics)
    values = default_values()
    for name in values.keys() - metrics.keys():
        assert render_files({**metrics, name: None}) == expected, name
    empty = nulls({name: value for name, value in values.items() if (name,) not in PASSED_ON})
    for name in monitors:
        empty["metrics"][name]["enabled"] = True
    empty["metrics"]["dashboards"]["labels"] = None
    assert render_files(empty) == expected


def test_null_removes_what_openshift_chooses_itself():
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    rendered = render_files({"podSecurityContext": ids})
    for name in ("deployment.yaml", "tests/health.yaml"):
        assert "runAsNonRoot" in rendered[name]
        assert not [each for each in ids if each in rendered[name]]


FUTILE: dict[str, tuple[Values, str]] = {
    "no account": ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    "nothing to scrape": (
        {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
        "metrics.service.enabled=true",
    ),
    "moving image": ({"images": {"learner": {"tag": "latest"}}}, "images.learner.digest"),
}


@pytest.mark.parametrize(("values", "fix"), FUTILE.values(), ids=FUTILE.keys())
def test_values_that_cannot_work_together_are_refused_with_the_cure(values, fix):
    with pytest.raises(helm_python.HelmRenderError, match=re.escape(fix)):
        render_files(values)
