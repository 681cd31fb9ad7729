"""The chart installs the definition of VCPORun as the operator generates it, and keeps it."""

from __future__ import annotations

import shutil

import helm_python
import pytest
from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import CHART, of_kind

KEEP = {"helm.sh/resource-policy": "keep"}


def definitions(values=None):
    return of_kind("CustomResourceDefinition", values or {})


def test_the_rendered_definitions_are_the_committed_ones():
    files = [CHART / "files" / f"{name}.crd.yaml" for name in ("run", "scaler")]
    committed = [YAML(typ="safe").load(file.read_text())["spec"] for file in files]
    assert [each["spec"] for each in definitions()] == committed


def test_runs_survive_an_uninstall():
    assert [each["metadata"]["annotations"] for each in definitions()] == [KEEP, KEEP]


def test_keeping_can_be_switched_off():
    kept = [each["metadata"].get("annotations") for each in definitions({"crds": {"keep": False}})]
    assert kept == [None, None]


def test_the_definition_can_be_left_to_somebody_else():
    assert of_kind("CustomResourceDefinition", {"crds": {"enabled": False}}) == []


@pytest.mark.parametrize("name", ["run", "scaler"])
def test_a_chart_without_a_definition_says_how_to_generate_it(tmp_path, name):
    shutil.copytree(CHART, tmp_path / "vcpo")
    (tmp_path / "vcpo" / "files" / f"{name}.crd.yaml").unlink()
    with (
        helm_python.Chart.load(tmp_path / "vcpo") as chart,
        pytest.raises(helm_python.HelmRenderError, match=rf"python -m vcpo_operator\.crd {name}"),
    ):
        chart.render({})
