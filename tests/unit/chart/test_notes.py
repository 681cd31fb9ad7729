"""The notes after an install say what comes next and warn of what was chosen."""

from __future__ import annotations

import re

import pytest

from tests.fixtures.chart.rendering import CHART, ROOT, Values, render_files
from tests.fixtures.chart.variants import NARROW


def notes(values: Values | None = None) -> str:
    return re.sub(r"\s+", " ", render_files(values)["NOTES.txt"])


def test_the_next_command_is_there():
    assert "kubectl apply --server-side --filename run.yaml" in notes()


def test_the_watched_namespaces_are_named():
    assert "handles runs in all namespaces" in notes()
    assert "handles runs in: team-a, team-b" in notes(NARROW)


WARNINGS: dict[str, tuple[Values, str]] = {
    "lost with the release": ({"crds": {"keep": False}}, "deletes the definition"),
    "no definition": ({"crds": {"enabled": False}}, "not part of this release (crds.enabled"),
    "no permissions": (
        {"rbac": {"create": False}},
        "grant them to the ServiceAccount vcpo-operator",
    ),
    "selected by": (
        {"metrics": {"serviceMonitor": {"enabled": True}}},
        "serviceMonitorSelector",
    ),
    "pods selected by": (
        {"metrics": {"podMonitor": {"enabled": True}}},
        "podMonitorSelector",
    ),
    "rules selected by": (
        {"metrics": {"prometheusRule": {"enabled": True}}},
        "ruleSelector",
    ),
    "shown by": (
        {"metrics": {"dashboards": {"enabled": True}}},
        "in vcpo-system, by grafana_dashboard=1 (`sidecar.dashboards.label`",
    ),
}


@pytest.mark.parametrize(("values", "warning"), WARNINGS.values(), ids=WARNINGS.keys())
def test_a_choice_with_consequences_is_pointed_out_and_only_then(values, warning):
    assert warning in notes(values)
    assert warning not in notes()


def test_the_api_servers_ports_are_named_while_traffic_is_restricted():
    assert "443, 6443, 8443, 16443" in notes()
    assert "API server" not in notes({"networkPolicy": {"enabled": False}})


_PATH = re.compile(r"(?<![\w:/.{-])(?:\.\./)*[\w-]+(?:[/.][\w-]+)*\.(?:yaml|json|md|py|tpl|txt)\b")
_OF_THE_USER = {"run.yaml"}


@pytest.mark.parametrize("text", ["templates/NOTES.txt", "values.yaml", "README.md"])
def test_every_file_that_is_named_exists(text):
    """In the chart, or in the project's folder."""
    named = set(_PATH.findall((CHART / text).read_text(encoding="utf-8"))) - _OF_THE_USER
    assert named
    missing = [path for path in named if not any((at / path).exists() for at in (CHART, ROOT))]
    assert missing == []
