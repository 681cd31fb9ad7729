"""The rules in faster time differ from the chart's in their durations and in nothing else."""

from __future__ import annotations

import json

import pytest

from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.variants import scaled_rules
from tools.monitoring.rules import RULES_FILE, rules


def scaled_by_name(factor: float):
    groups = json.loads(scaled_rules(factor))["groups"]
    return {
        rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]
    }


@pytest.fixture(scope="module")
def twentieth():
    return scaled_by_name(1 / 20)


def test_a_wait_of_ten_minutes_takes_thirty_seconds(twentieth):
    assert twentieth["VCPOEffectiveSampleSizeLow"]["for"] == "30000ms"


def test_an_alert_that_does_not_wait_still_does_not(twentieth):
    assert "for" not in twentieth["VCPORolledBack"]


def test_a_range_keeps_four_scrapes_of_a_second(twentieth):
    assert "vcpo_mismatch_exceeded[15000ms]" in twentieth["VCPOEnginesDisagree"]["expr"]
    assert "vcpo_learner_rollbacks[180000ms]" in twentieth["VCPORolledBack"]["expr"]


def test_an_offset_is_scaled(twentieth):
    assert "offset 30000ms" in twentieth["VCPOLearnerStalled"]["expr"]


def test_thresholds_in_seconds_are_scaled_and_shares_are_not(twentieth):
    assert twentieth["VCPOLearnerStalled"]["expr"].count("30  # threshold") == 1
    assert "> 0.5  # threshold" in twentieth["VCPOLearnerStarved"]["expr"]


def test_every_group_is_evaluated_once_a_scrape_and_a_range_keeps_four_of_them():
    text = scaled_rules(1 / 1_000, scrape_interval_ms=250)
    assert {group["interval"] for group in json.loads(text)["groups"]} == {"250ms"}
    assert "[1000ms]" in text
    assert "[4000ms]" in scaled_rules(1 / 1_000)


def test_no_rule_is_lost(twentieth):
    assert set(twentieth) == {rule.name for rule in rules()}


@needs_promtool
def test_prometheus_accepts_the_rules_at_both_speeds(tmp_path):
    fast = tmp_path / "fast.yaml"
    fast.write_text(scaled_rules(1 / 20))
    assert promtool("check", "rules", RULES_FILE, fast) == ""
