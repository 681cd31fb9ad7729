"""Bills of materials: what an image holds, who needs whom, and the same bytes each time."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from cyclonedx.output.json import JsonV1Dot6

from scripts.supply import sbom
from scripts.supply.images import IMAGES, Image, pyproject
from scripts.supply.lock import read_lock

LOCK = f"""\
jinja2==3.1.6 \\
    --hash=sha256:{"a" * 64}
    # via vcpo (pyproject.toml)
markupsafe==3.0.4 \\
    --hash=sha256:{"b" * 64}
    # via jinja2
torch==2.13.0+cpu \\
    --hash=sha256:{"c" * 64}
    # via vcpo (pyproject.toml)
"""
LICENSES = {
    ("jinja2", "3.1.6"): "BSD-3-Clause",
    ("markupsafe", "3.0.4"): "BSD-3-Clause",
    ("torch", "2.13.0"): "Apache-2.0 AND MIT",
}
IMAGE = Image(name="learner-cpu", folder="learner_svc", extras=("learner",), for_cpus=True)
PROJECT = {"name": "vcpo", "version": "0.1.0", "license": "Apache-2.0"}
MADE_AT = datetime(2026, 1, 2, tzinfo=UTC)
BASE = ("python:3.11.14-slim-bookworm", f"sha256:{'d' * 64}")


def document(lock=LOCK, licenses=LICENSES, base=BASE):
    bom = sbom.bill_of_materials(IMAGE, PROJECT, lock, base, licenses, MADE_AT)
    return json.loads(JsonV1Dot6(bom).output_as_string())


def test_an_image_is_a_container_of_its_base_this_project_and_the_packages_of_its_lock():
    found = document()
    image = found["metadata"]["component"]
    assert (image["type"], image["name"], image["version"]) == (
        "container",
        "vcpo-learner-cpu",
        "0.1.0",
    )
    assert {each["name"]: each.get("purl") for each in found["components"]} == {
        "python": f"pkg:docker/python@sha256:{'d' * 64}",
        "vcpo": None,
        "jinja2": "pkg:pypi/jinja2@3.1.6",
        "markupsafe": "pkg:pypi/markupsafe@3.0.4",
        "torch": "pkg:pypi/torch@2.13.0%2Bcpu",
    }


def test_each_package_has_its_license():
    licenses = {each["name"]: each.get("licenses") for each in document()["components"]}
    assert licenses["jinja2"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert licenses["torch"] == [{"expression": "Apache-2.0 AND MIT"}]


def test_the_graph_says_who_needs_whom():
    edges = {each["ref"]: each.get("dependsOn", []) for each in document()["dependencies"]}
    assert edges["image"] == ["base image", "vcpo (pyproject.toml)"]
    assert edges["vcpo (pyproject.toml)"] == ["jinja2", "torch"]
    assert edges["jinja2"] == ["markupsafe"]
    assert edges["torch"] == []


def test_a_base_without_digest_is_named_by_its_tag():
    parts = document(base=("python:3.11.14-slim-bookworm", None))["components"]
    assert "pkg:docker/python@3.11.14-slim-bookworm" in [each.get("purl") for each in parts]


def test_it_says_when_it_was_made():
    assert document()["metadata"]["timestamp"] == "2026-01-02T00:00:00+00:00"


def test_the_same_lock_gives_the_same_document_and_another_lock_another_number():
    assert document() == document()
    changed = document(LOCK.replace("b" * 64, "e" * 64))
    assert changed["serialNumber"] != document()["serialNumber"]


def test_a_package_without_a_license_is_named():
    with pytest.raises(KeyError, match="markupsafe"):
        document(licenses={key: value for key, value in LICENSES.items() if key[0] != "markupsafe"})


def test_the_operators_document_is_valid_and_has_all_packages_of_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(sbom, "FOLDER", tmp_path)
    operator = IMAGES[0]
    listed = sbom.listed_licenses(sbom.LIST.read_text())
    path = sbom.write_sbom(operator, pyproject()["project"], listed, MADE_AT)
    named = {each["name"] for each in json.loads(path.read_text())["components"]}
    assert named - {"vcpo", "python"} == {
        each.name for each in read_lock(operator.lock.read_text())
    }
