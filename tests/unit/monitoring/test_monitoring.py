"""The Alertmanager file names alerts that exist, and Alertmanager accepts it."""

import json
import re
import shutil
import subprocess

import pytest

from tests.fixtures.chart.rendering import ROOT
from tests.fixtures.promql import unknown_names
from tests.fixtures.rules.cases import labelled, promtool_tests
from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.recorded_runs import recorded_steps, scraped_series
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


SLOWED = 60
"""A step then takes 15 to 25 seconds, as those of large models do."""
BOUNDS = {"healthy": 6, "collapse": 48, "recovery": 48}
"""The runs' `algorithm.maxPolicyLagSteps`."""

WARNING, COLLAPSED = "VCPOCollapseWarning", "VCPORewardCollapsed"
LOW = "VCPOEffectiveSampleSizeLow"
THROTTLED = "VCPOThrottledForLong"
SLOWED_DOWN = "VCPOLearningRateBackedOff"

COLLAPSE = {
    # Step 5 is critical at 3:44, and step 7 is the third in a row.
    4: set(),
    5: set(),
    # The reward falls at 7:37, at step 11. This run had no rollbacks.
    7: {WARNING},
    12: {WARNING, COLLAPSED},
    # The relative ESS is below 0.3 from 2:58 to 31:14, so for ten minutes at 12:58.
    13: {WARNING, COLLAPSED, LOW},
    23: {WARNING, LOW},
    # The score falls to 0.38 at 31:20. The limit fell from 48 at 8:50, sixty steps ago.
    32: {THROTTLED},
    39: {WARNING, THROTTLED},
}
"""Alerts that fire, by minute. None is critical but that of the reward: the limit is above 0."""

RECOVERY = {
    # Step 5 is critical at 4:22; the limit falls from 48 to 0 at 5:41.
    6: set(),
    10: {WARNING},
    # The score falls to 0.6 at 10:18, and the count of critical steps begins anew.
    11: set(),
    40: set(),
    # Critical again from 43:10 to 46:40. The recorded rate stays at a quarter from then on.
    44: {SLOWED_DOWN},
    45: {WARNING, SLOWED_DOWN},
    46: {WARNING, SLOWED_DOWN},
    51: {SLOWED_DOWN},
    # The limit is 9 of 48 after 40 minutes, and rises.
    90: {SLOWED_DOWN},
}


def firing_at(name: str, expected: dict[int, set[str]], folder):
    series = scraped_series(recorded_steps(name), slowed=SLOWED, bound=BOUNDS[name])
    test = {
        "interval": "15s",
        "input_series": [
            {"series": labelled(key, "ml"), "values": values} for key, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)
                ],
            }
            for minute, alerts in expected.items()
        ],
    }
    path = folder / "tests.json"
    document = {**promtool_tests([]), "evaluation_interval": "15s", "tests": [test]}
    path.write_text(json.dumps(document))
    return promtool("test", "rules", path)


@needs_promtool
def test_a_healthy_run_raises_no_alert_at_any_minute(tmp_path):
    assert firing_at("healthy", {minute: set() for minute in range(1, 40)}, tmp_path) == ""


@needs_promtool
def test_a_collapse_raises_exactly_its_alerts_and_the_first_one_before_the_reward_falls(tmp_path):
    assert firing_at("collapse", COLLAPSE, tmp_path) == ""


@needs_promtool
def test_alerts_resolve_when_the_throttle_has_cured_the_run_and_fire_again_at_the_next_dip(
    tmp_path,
):
    assert firing_at("recovery", RECOVERY, tmp_path) == ""
