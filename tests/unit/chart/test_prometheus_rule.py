"""The chart's PrometheusRule is the rule file with the thresholds of the values."""

from __future__ import annotations

import json
import re

import helm_python
import pytest
from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import CHART, Values, chart, default_values, only
from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.variants import thresholds
from tools.monitoring.rules import RULES_FILE, rules

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FIELDS = SCHEMA["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]
ALERTS = sorted({rule.name for rule in rules() if rule.is_alert})


def values(**settings: object) -> Values:
    return {"metrics": {"prometheusRule": {"enabled": True, **settings}}}


def groups(**settings: object):
    return only("PrometheusRule", values(**settings))["spec"]["groups"]


def alerts(**settings: object):
    listed = [rule for group in groups(**settings) for rule in group["rules"]]
    return {rule["alert"]: rule for rule in listed if "alert" in rule}


def test_by_default_the_rules_are_those_of_the_file():
    assert groups() == YAML(typ="safe").load(RULES_FILE)["groups"]


@needs_promtool
def test_prometheus_accepts_what_helm_renders(tmp_path):
    rendered = tmp_path / "rules.json"
    numbers = dict.fromkeys(thresholds(), 1)
    rendered.write_text(json.dumps({"groups": groups(thresholds=numbers)}))
    assert promtool("check", "rules", rendered) == ""


@pytest.mark.parametrize("name", thresholds())
def test_a_threshold_of_the_values_replaces_its_number_everywhere(name):
    changed = json.dumps(groups(thresholds={name: 0.125 if thresholds()[name] < 1 else 7}))
    number = "0.125" if thresholds()[name] < 1 else "7"
    found = re.findall(rf"([0-9.]+)[,)]* +# threshold {name}\b", changed)
    assert found
    assert set(found) == {number}
    other = {each: value for each, value in thresholds().items() if each != name}
    for each, value in other.items():
        kept = re.findall(rf"([0-9.]+)[,)]* +# threshold {each}\b", changed)
        assert {float(number) for number in kept} == {value}


def test_the_values_the_schema_and_the_file_name_the_same_thresholds():
    listed = default_values()["metrics"]["prometheusRule"]["thresholds"]
    assert listed == thresholds()
    assert list(FIELDS["thresholds"]["properties"]) == list(thresholds())


def test_the_schema_names_every_alert():
    assert FIELDS["disabled"]["items"]["enum"] == ALERTS


def test_a_disabled_alert_is_left_out_whatever_its_severity():
    left = alerts(disabled=["VCPOStepsSkipped", "VCPORunFailed"])
    assert set(ALERTS) - set(left) == {"VCPOStepsSkipped", "VCPORunFailed"}


def test_recording_rules_stay_when_every_alert_is_disabled():
    left = groups(disabled=ALERTS)
    assert [group["name"] for group in left] == ["vcpo-recording"]


def test_an_alert_links_to_the_runbook_and_the_panel_at_the_users_addresses():
    annotations = alerts(
        runbookBaseUrl="https://wiki.example.com/vcpo/runbooks",
        grafanaUrl="https://grafana.example.com",
    )["VCPORunFailed"]["annotations"]
    assert annotations["runbook_url"] == "https://wiki.example.com/vcpo/runbooks#vcporunfailed"
    assert annotations["dashboard_url"].startswith("https://grafana.example.com/d/vcpo-run?")
    assert annotations["summary"] == "Run {{ $labels.run }} failed."


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown alert": ({"disabled": ["VCPONoSuchAlert"]}, "/metrics/prometheusRule/disabled/0"),
    "unknown threshold": ({"thresholds": {"lowEss": 0.3}}, "lowEss"),
    "share above 1": ({"thresholds": {"lowRelativeEss": 30}}, "/thresholds/lowRelativeEss"),
    "duration for seconds": ({"thresholds": {"queueOldestSeconds": "2m"}}, "/queueOldestSeconds"),
    "address without a scheme": ({"grafanaUrl": "grafana.example.com"}, "/grafanaUrl"),
}


@pytest.mark.parametrize(("settings", "named"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_refused_by_its_path(settings, named):
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(named)):
        chart().validate_schema(values(**settings))
