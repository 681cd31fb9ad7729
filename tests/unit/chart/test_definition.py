"""The chart installs the definition of VCPORun as the operator generates it, and keeps it."""

from __future__ import annotations

import shutil

import helm_python
import pytest
from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import CHART, of_kind

KEEP = {"helm.sh/resource-policy": "keep"}


def test_the_rendered_definition_is_the_committed_one_and_survives_an_uninstall():
    committed = YAML(typ="safe").load((CHART / "files/run.crd.yaml").read_text())
    (made,) = of_kind("CustomResourceDefinition")
    assert made["spec"] == committed["spec"]
    assert made["metadata"]["annotations"] == KEEP


def test_keeping_can_be_switched_off():
    made = of_kind("CustomResourceDefinition", {"crds": {"keep": False}})
    assert not any("annotations" in each["metadata"] for each in made)


def test_the_definition_can_be_left_to_somebody_else():
    assert of_kind("CustomResourceDefinition", {"crds": {"enabled": False}}) == []


def test_a_chart_without_the_definition_says_how_to_generate_it(tmp_path):
    shutil.copytree(CHART, tmp_path / "vcpo")
    (tmp_path / "vcpo" / "files" / "run.crd.yaml").unlink()
    with (
        helm_python.Chart.load(tmp_path / "vcpo") as chart,
        pytest.raises(helm_python.HelmRenderError, match=r"python -m vcpo_operator\.crd >"),
    ):
        chart.render({})
