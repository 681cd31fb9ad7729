"""The Alertmanager file names alerts that exist, and Alertmanager accepts it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.fixtures.chart.rendering import ROOT
from tools.monitoring.rules import rules

FILE = ROOT / "examples" / "alertmanager.yml"


def test_every_name_in_a_matcher_is_an_alert():
    found = re.findall(r"VCPO\((.*?)\)", FILE.read_text())
    named = {f"VCPO{name}" for text in found for name in text.split("|")}
    assert named
    assert named <= {rule.name for rule in rules() if rule.is_alert}


@pytest.mark.skipif(shutil.which("amtool") is None, reason="of Debian's prometheus-alertmanager")
def test_alertmanager_accepts_the_file():
    command = ["amtool", "check-config", FILE]
    assert "SUCCESS" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
