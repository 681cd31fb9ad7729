"""The install without Helm is the chart, and applies in order into its own namespace."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from scripts.render_manifests import DEFINITION, MANIFESTS, chart_definition, rendered_files
from tests.fixtures.chart.rendering import Manifest, render

FILES: dict[str, list[Manifest]] = {
    path.name: list(YAML(typ="safe").load_all(path.read_text())) for path in (DEFINITION, MANIFESTS)
}
DOCUMENTS = FILES["vcpo.yaml"]


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize(("path", "text"), [*rendered_files().items(), *chart_definition().items()])
def test_a_committed_file_is_what_the_chart_renders(path, text):
    assert path.read_text() == text, f"{path.name} is stale; cure: scripts/render_manifests.py"


def test_the_definitions_alone_are_in_a_file_of_their_own():
    kind = "CustomResourceDefinition"
    assert [each["kind"] for each in FILES["run.crd.yaml"]] == [kind]
    assert kind not in {each["kind"] for each in DOCUMENTS}


def test_they_hold_every_object_of_the_chart_but_the_test_pod():
    expected = {identity(manifest) for manifest in render() if manifest["kind"] != "Pod"}
    found = {identity(manifest) for manifests in FILES.values() for manifest in manifests}
    assert found - {("Namespace", "vcpo-system")} == expected


def test_the_namespace_comes_first_and_enforces_the_restricted_profile():
    labels = DOCUMENTS[0]["metadata"]["labels"]
    assert identity(DOCUMENTS[0]) == ("Namespace", "vcpo-system")
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_nothing_in_them_claims_to_be_helms():
    text = MANIFESTS.read_text() + DEFINITION.read_text()
    assert "helm.sh" not in text
    assert "managed-by: Helm" not in text
