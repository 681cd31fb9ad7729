"""The Alertmanager file routes by severity, and what silences what names alerts that exist."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import ROOT
from tools.monitoring.rules import rules

FILE = ROOT / "examples" / "alertmanager.yml"
ALERTS = {rule.name: rule.labels["severity"] for rule in rules() if rule.is_alert}
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is of Debian's prometheus-alertmanager"
)


@pytest.fixture(scope="module")
def config():
    return YAML(typ="safe").load(FILE)


def amtool(*arguments: str) -> str:
    command = ["amtool", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def alerts_of(matchers):
    """Names of the alerts that a list of matchers may select."""
    (pattern,) = (
        found[1] for each in matchers if (found := re.fullmatch(r'alertname=~"(.*)"', each))
    )
    return {name for name in ALERTS if re.fullmatch(pattern, name)}


def test_every_receiver_of_a_route_is_defined(config):
    routes = [config["route"], *config["route"]["routes"]]
    assert {each["receiver"] for each in routes} == {each["name"] for each in config["receivers"]}


def test_what_silences_and_what_is_silenced_are_alerts_of_the_rules(config):
    for rule in config["inhibit_rules"]:
        source, target = alerts_of(rule["source_matchers"]), alerts_of(rule["target_matchers"])
        assert source
        assert target
        assert rule["equal"] == ["namespace", "run"]


def test_every_name_in_a_matcher_is_an_alert(config):
    texts = [
        matcher
        for rule in config["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
    ]
    named = {
        f"VCPO{name}"
        for text in texts
        for found in re.findall(r"VCPO\((.*?)\)", text)
        for name in found.split("|")
    }
    assert named
    assert named <= ALERTS.keys()


@needs_amtool
def test_alertmanager_accepts_the_file():
    assert "SUCCESS" in amtool("check-config", str(FILE))


@needs_amtool
@pytest.mark.parametrize(
    ("severity", "receiver"),
    [("critical", "on-call"), ("warning", "tickets"), ("info", "owners")],
)
def test_an_alert_goes_to_the_receiver_of_its_severity(severity, receiver):
    name = next(name for name, found in ALERTS.items() if found == severity)
    labels = (f"alertname={name}", f"severity={severity}", "namespace=ml", "run=demo")
    assert amtool("config", "routes", "test", f"--config.file={FILE}", *labels) == receiver
