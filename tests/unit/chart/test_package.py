"""The packaged chart is complete and has the project's version."""

from __future__ import annotations

import tomllib

import helm_python

from tests.fixtures.chart.rendering import CHART, NAMESPACE, ROOT, chart, render_files


def test_chart_application_and_project_have_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = chart().metadata
    assert metadata["version"] == metadata["appVersion"] == project["version"]


def test_the_archive_renders_as_the_folder_does(tmp_path):
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as packaged:
        files = packaged.render({}, name="vcpo", namespace=NAMESPACE)
    assert {name.removeprefix("vcpo/templates/"): text for name, text in files.items()} == (
        render_files()
    )


def test_clusters_too_old_for_admission_policies_are_refused():
    assert chart().metadata["kubeVersion"] == ">=1.30.0-0"
