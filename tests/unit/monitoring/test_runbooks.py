"""Every alert has a section of the runbooks, at the anchor that its annotation names."""

from __future__ import annotations

import re

from tests.fixtures.chart.rendering import ROOT
from tests.fixtures.promql import unknown_names
from tools.monitoring.rules import rules

PAGE = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
ALERTS = {rule.name: rule for rule in rules() if rule.is_alert}
RECORDED = frozenset(rule.name for rule in rules() if not rule.is_alert)


def test_there_is_a_section_for_each_alert_at_its_address_and_no_other():
    headings = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert rule.annotations["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_every_metric_that_a_runbook_names_exists():
    metrics = set(re.findall(r"`([\w:]*vcpo_[\w:]+)", PAGE)) - {"vcpo_operator"}
    assert {name for name in metrics if unknown_names(name, RECORDED)} == set()


def test_documents_name_alerts_that_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "charts/vcpo/README.md"]
    others = {"VCPORun", "VCPORunSpec", "VCPOTrainer"}
    named = {name for page in pages for name in re.findall(r"\bVCPO[A-Z]\w+", page.read_text())}
    assert sorted(named - ALERTS.keys() - others) == []
