"""Rules and their tests use series that somebody exports, and places that exist."""

from __future__ import annotations

import re

import pytest

from tests.fixtures.promql import unknown_names
from tests.fixtures.rules.cases import AREAS, cases_of, healthy, suspended
from tools.monitoring.rules import rules

RECORDED = frozenset(rule.name for rule in rules() if not rule.is_alert)


def test_every_series_label_and_closed_value_of_a_rule_exists():
    faults = {rule.name: unknown_names(rule.expression, RECORDED) for rule in rules()}
    assert {name: found for name, found in faults.items() if found} == {}


def test_every_series_of_the_cases_exists():
    cases = [case.series for area in AREAS for case in cases_of(area)]
    keys = {key for series in (healthy(), suspended(), *cases) for key in series}
    assert {key: found for key in sorted(keys) if (found := unknown_names(key))} == {}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("vcpo_no_such_thing > 1", "metric vcpo_no_such_thing"),
        ("namespace_run:vcpo_gone:ratio", "metric namespace_run:vcpo_gone:ratio"),
        ('vcpo_learner_phase{faze="running"}', "label faze of vcpo_learner_phase"),
        ('vcpo_learner_phase{phase="runing"}', "phase='runing' of vcpo_learner_phase"),
        ("sum by (rnu) (vcpo_learner_step)", "label rnu"),
        ("vcpo_learner_step and on (pud) vcpo_learner_step", "label pud"),
        ("rate(vcpo_policy_lag_steps[5m])", "metric vcpo_policy_lag_steps"),
    ],
)
def test_a_misspelt_name_is_found(expression, fault):
    assert unknown_names(expression, RECORDED) == [fault]


def test_a_text_uses_labels_that_the_alert_has():
    """Prometheus renders an absent label as nothing, so a misspelt one would go unseen."""
    offenders = [
        (rule.name, label)
        for rule in rules()
        for text in rule.annotations.values()
        for label in re.findall(r"\$labels\.(\w+)", text)
        if not re.search(rf"\b{label}\b", rule.expression)
        and not any(label in name.partition(":")[0] for name in _used(rule.expression))
    ]
    assert offenders == []


def _used(expression: str) -> set[str]:
    return {name for name in RECORDED if name in expression}
