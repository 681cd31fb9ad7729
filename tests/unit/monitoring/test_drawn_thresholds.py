"""A panel that shows what an alert judges draws the alert's own number.

An alert compares a quantity with a number, or with a number times another series. A panel shows the
quantity if one of its curves is made of the same series; the number stands in a limit or a band.
"""

from __future__ import annotations

import promql_parser
from promql_parser import BinaryExpr, NumberLiteral, ParenExpr, VectorSelector

from tests.fixtures.observation.panel_queries import filled_in
from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.board import Role
from tools.monitoring.rules import rules

COMPARISONS = {">", ">=", "<", "<="}
NOT_DRAWN = {
    ("VCPOLearnerRestarting", "restarts"): "the alert counts an hour, a bar the time of a point",
    ("VCPOLearnerRestarting", "runs"): "all restarts, not those of an hour",
    ("VCPOPromptsTeachNothing", "drops"): "one reason of the stack, dropped on purpose",
    ("VCPOPolicyLagAboveAdmission", "runs"): "steps of a window, not the step's number",
}
NOT_SHOWN = {"VCPORunStartupDeadlineNear", "VCPORunCertificateEnds"}
"""Alerts of a time that is ahead: the panel of conditions tells what follows."""


RECORDED = {rule.name: rule.expression for rule in rules() if not rule.is_alert}


def nodes(tree, sort):
    found = []
    promql_parser.walk(tree, lambda node: found.append(node) if isinstance(node, sort) else None)
    return found


def series(tree):
    """Names of the series of a tree; of a recorded one those that it is recorded from."""
    names = {each.name for each in nodes(tree, VectorSelector) if each.name}
    recorded = names & RECORDED.keys()
    return names.union(*(series(promql_parser.parse(RECORDED[each])) for each in recorded))


def quantity(tree):
    """The series that an alert judges: the first of its comparison."""
    name = nodes(tree, VectorSelector)[0].name
    return quantity(promql_parser.parse(RECORDED[name])) if name in RECORDED else name


def numbers(tree):
    return {each.val for each in nodes(tree, NumberLiteral)} - {0.0}


def comparisons(tree):
    """The comparisons with a number that make an alert fire: not those after `unless`."""
    if isinstance(tree, ParenExpr):
        return comparisons(tree.expr)
    if not isinstance(tree, BinaryExpr):
        return []
    operator = str(tree.op)
    if operator in COMPARISONS:
        return [tree] if numbers(tree.rhs) else []
    if operator == "unless":
        return comparisons(tree.lhs)
    return comparisons(tree.lhs) + comparisons(tree.rhs)


def filled(expression):
    return promql_parser.parse(filled_in(expression, run="demo", namespace="", interval="1m"))


def shows(panel, name):
    """Whether a curve of a panel, other than a limit, is of a series."""
    curves = [each for each in panel.queries if each.role is not Role.LIMIT]
    return any(name in series(filled(each.expression)) for each in curves)


def drawn(panel):
    """The numbers of a panel's limits and bands."""
    limits = [each for each in panel.queries if each.role is Role.LIMIT]
    found = {number for each in limits for number in numbers(filled(each.expression))}
    bands = [*panel.bands, *(band for each in panel.queries for band in each.bands)]
    return found | {band.start for band in bands}


PANELS = [panel for board in BOARDS for panel in board.panels]
JUDGED = [
    (rule.name, quantity(comparison.lhs), numbers(comparison.rhs))
    for rule in rules()
    if rule.is_alert
    for comparison in comparisons(promql_parser.parse(rule.expression))
]
SHOWN = [
    (alert, panel, limits)
    for alert, name, limits in JUDGED
    for panel in PANELS
    if shows(panel, name)
]


def test_a_panel_that_shows_what_an_alert_judges_draws_its_number():
    missing = {
        (alert, panel.slug): sorted(limits - drawn(panel))
        for alert, panel, limits in SHOWN
        if not limits <= drawn(panel)
    }
    assert {place: limits for place, limits in missing.items() if place not in NOT_DRAWN} == {}
    assert missing.keys() == NOT_DRAWN.keys()


def test_what_an_alert_compares_with_a_number_is_on_a_board():
    alerts = {alert for alert, _, _ in JUDGED}
    assert len(alerts) > 20
    assert alerts - {alert for alert, _, _ in SHOWN} == NOT_SHOWN
