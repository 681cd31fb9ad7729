"""Every alert has a runbook, whose queries ask for series that exist."""

from __future__ import annotations

import re

from tests.fixtures.chart.rendering import ROOT
from tests.fixtures.promql import unknown_names
from tools.monitoring.rules import rules

PAGES = {path.stem: path for path in (ROOT / "docs" / "runbooks").glob("*/*.md")}
ALERTS = {rule.name: rule for rule in rules() if rule.is_alert}
RECORDED = frozenset(rule.name for rule in rules() if not rule.is_alert)


def test_there_is_a_runbook_for_each_alert_at_its_address_and_no_other():
    addresses = {rule.annotations["runbook_url"] for rule in ALERTS.values()}
    assert addresses == {path.relative_to(ROOT).as_posix() for path in PAGES.values()}


def test_every_query_is_promql_over_series_that_exist():
    queries = [
        query
        for page in PAGES.values()
        for query in re.findall(r"^ *```promql\n(.*?)^ *```", page.read_text(), re.M | re.S)
    ]
    assert {query: found for query in queries if (found := unknown_names(query, RECORDED))} == {}


def test_documents_name_alerts_that_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "charts/vcpo/README.md"]
    others = {"VCPORun", "VCPORunSpec", "VCPOTrainer"}
    named = {name for page in pages for name in re.findall(r"\bVCPO[A-Z]\w+", page.read_text())}
    assert sorted(named - ALERTS.keys() - others) == []
