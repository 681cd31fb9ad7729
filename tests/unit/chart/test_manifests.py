"""The install without Helm is the chart, and applies in order into its own namespace."""

from __future__ import annotations

from ruamel.yaml import YAML

from scripts.render_manifests import MANIFESTS, manifests
from tests.unit.chart.rendering import Manifest, render

DOCUMENTS: list[Manifest] = list(YAML(typ="safe").load_all(MANIFESTS.read_text()))


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def test_the_committed_manifests_are_what_the_chart_renders():
    cure = "python scripts/render_manifests.py"
    assert MANIFESTS.read_text() == manifests(), f"deploy/vcpo.yaml is stale; cure: {cure}"


def test_they_hold_every_object_of_the_chart_but_the_test_pod():
    expected = {identity(manifest) for manifest in render() if manifest["kind"] != "Pod"}
    assert {identity(manifest) for manifest in DOCUMENTS} - {
        ("Namespace", "vcpo-system")
    } == expected


def test_the_namespace_comes_first_and_enforces_the_restricted_profile():
    labels = DOCUMENTS[0]["metadata"]["labels"]
    assert identity(DOCUMENTS[0]) == ("Namespace", "vcpo-system")
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_operator_comes_last():
    assert identity(DOCUMENTS[-1]) == ("Deployment", "vcpo-operator")


def test_nothing_in_them_claims_to_be_helms():
    text = MANIFESTS.read_text()
    assert "helm.sh" not in text
    assert "managed-by: Helm" not in text
