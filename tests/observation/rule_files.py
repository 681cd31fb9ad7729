"""The alerts that are defined, those that have a runbook, and those that have cases."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fixtures.rules.cases import AREAS, cases_of
from tools.monitoring.rules import rules

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks.md"


def defined_alerts() -> set[str]:
    """Names of the alerts in the chart's rule file."""
    return {rule.name for rule in rules() if rule.is_alert}


def alerts_with_runbook() -> set[str]:
    """Names of the alerts of which there is a runbook."""
    headings = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)
    return defined_alerts() & set(headings)


def tested_alerts() -> set[str]:
    """Names of the alerts with a case that fires and one that is silent, judged by promtool."""
    cases = [case for area in AREAS for case in cases_of(area)]
    firing = {case.alert for case in cases if case.fires}
    silent = {case.alert for case in cases if not case.fires}
    return defined_alerts() & firing & silent
