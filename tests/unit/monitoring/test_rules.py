"""Every alert fires when it should and is silent when it should, by Prometheus' own promtool."""

import json
import re
from collections import Counter

import pytest

from tests.fixtures.promql import unknown_names
from tests.fixtures.rules.cases import AREAS, cases_of, healthy, labelled, promtool_tests, suspended
from tests.fixtures.rules.paces import PACES_S, alerts_at
from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.variants import rules_of_alert
from tools.monitoring.rules import RULES_FILE, rules

ALERTS = sorted({rule.name for rule in rules() if rule.is_alert})
CASES = [case for area in AREAS for case in cases_of(area)]


def run_tests(tmp_path, tests) -> str:
    path = tmp_path / "tests.json"
    path.write_text(json.dumps(tests))
    return promtool("test", "rules", path)


@needs_promtool
def test_the_file_is_one_that_prometheus_loads():
    assert promtool("check", "rules", RULES_FILE) == ""


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_and_is_silent_as_its_cases_say(tmp_path, alert):
    only = tmp_path / "rules.json"
    only.write_text(rules_of_alert(alert))
    cases = [case for case in CASES if case.alert == alert]
    assert run_tests(tmp_path, promtool_tests(cases, only)) == ""


@needs_promtool
def test_a_healthy_run_raises_no_alert(tmp_path):
    checks = [
        {"alertname": alert, "eval_time": at, "exp_alerts": []}
        for alert in ALERTS
        for at in ("1m", "15m", "1h", "2h")
    ]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": labelled(key, "ml"), "values": values} for key, values in healthy().items()
        ],
        "alert_rule_test": checks,
    }
    assert run_tests(tmp_path, {**promtool_tests([]), "tests": [test]}) == ""


def test_every_alert_has_cases_that_fire_and_cases_that_do_not():
    kinds = Counter((case.alert, case.fires) for case in CASES)
    assert sorted({case.alert for case in CASES}) == ALERTS
    assert [alert for alert in ALERTS if not (kinds[alert, True] and kinds[alert, False])] == []


def test_every_alert_of_a_run_is_joined_with_the_active_runs():
    without = {
        rule.name
        for rule in rules()
        if rule.is_alert
        and not re.search(
            r"group_left \(owner, team\) namespace_run_owner_team:vcpo_active$", rule.expression
        )
    }
    assert without == {
        "VCPORewardCollapsed",
        "VCPORunFailed",
        "VCPOOperatorDown",
        "VCPOOperatorReconcileErrors",
        "VCPOOperatorQueueStuck",
        "VCPOOperatorWatchDeaf",
    }


def test_an_alert_says_how_bad_it_is_what_it_means_and_where_to_look():
    for rule in rules():
        if rule.is_alert:
            assert set(rule.annotations) == {
                "summary",
                "description",
                "runbook_url",
                "dashboard_url",
            }
            assert rule.labels["severity"] in {"critical", "warning", "info"}


def test_a_recorded_series_is_named_after_its_labels():
    for rule in rules():
        if not rule.is_alert:
            assert re.fullmatch(r"namespace_run(_reason|_owner_team)?:vcpo_\w+(:\w+)?", rule.name)


RECORDED = frozenset(rule.name for rule in rules() if not rule.is_alert)


def test_every_series_label_and_value_of_a_rule_and_of_its_cases_exists():
    faults = {rule.name: unknown_names(rule.expression, RECORDED) for rule in rules()}
    assert {name: found for name, found in faults.items() if found} == {}
    series = (healthy(), suspended(), *(case.series for case in CASES))
    keys = {key for each in series for key in each}
    assert {key: found for key in sorted(keys) if (found := unknown_names(key))} == {}


def test_a_text_uses_labels_that_the_alert_has():
    """Prometheus renders an absent label as nothing, so a misspelt one would go unseen."""
    offenders = [
        (rule.name, label)
        for rule in rules()
        for text in rule.annotations.values()
        for label in re.findall(r"\$labels\.(\w+)", text)
        if not re.search(rf"\b{label}\b", rule.expression)
        and not any(label in name for name in RECORDED if name in rule.expression)
    ]
    assert offenders == []


@needs_promtool
@pytest.mark.parametrize("pace_s", PACES_S)
def test_from_an_hour_of_load_over_a_restart_to_the_end_only_a_collapse_of_the_reward_alerts(
    tmp_path, pace_s
):
    assert alerts_at(pace_s, tmp_path, collapses=True) == {
        "VCPOEvaluationFalling",
        "VCPONotRolledBack",
        "VCPORewardCollapsed",
    }
