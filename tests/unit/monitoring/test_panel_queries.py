"""Queries of the boards ask for what the catalogue declares, and in the way its type allows.

Each rule is one test that lists the queries that break it.
"""

from __future__ import annotations

import re

import promql_parser
import pytest
from promql_parser import AggregateExpr, Call, MatrixSelector, VectorSelector

from tests.fixtures.observation.panel_queries import filled_in, needs_of, panel_queries
from tests.fixtures.promql import unknown_names
from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.board import Kind
from tools.monitoring.dashboards.marks import marks
from vcpo.metrics import catalogue
from vcpo.metrics.metric import MetricKind

METRICS = {metric.name: metric for metric in catalogue.ALL}


def filled(expression):
    return filled_in(expression, run="demo", namespace="", interval="1m")


QUERIES = [
    (f"{board.uid}/{panel.slug}: {query.legend}", panel, query, filled(query.expression))
    for board in BOARDS
    for panel in board.panels
    for query in panel.queries
]
PARSED = [(name, panel, query, promql_parser.parse(text)) for name, panel, query, text in QUERIES]


def nodes(expression, sort):
    found = []
    promql_parser.walk(
        expression, lambda node: found.append(node) if isinstance(node, sort) else None
    )
    return found


def calls(expression, *functions):
    return [call for call in nodes(expression, Call) if call.func.name in functions]


def metric_of(selector):
    """The declaration of what a selector asks for; None for a series that is not ours."""
    name = selector.name or ""
    return METRICS.get(name) or METRICS.get(re.sub("_(bucket|sum|count)$", "", name))


def is_gauge(selector):
    metric = metric_of(selector)
    kind = metric.kind if metric else None
    return kind is MetricKind.GAUGE or selector.name == "process_resident_memory_bytes"


def test_every_metric_label_and_value_of_a_closed_set_is_in_the_catalogue():
    faults = {name: unknown_names(text) for name, _, _, text in QUERIES}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_every_mark_asks_for_what_the_catalogue_has():
    for board in BOARDS:
        ours = [filled(mark.expression) for mark in marks(board) if mark.name != "Alerts"]
        assert [fault for text in ours for fault in unknown_names(text)] == []


def test_rates_are_of_counters_and_slopes_of_gauges():
    offenders = [
        name
        for name, _, _, expression in PARSED
        for call in calls(expression, "rate", "increase", "deriv")
        for window in nodes(call.args[0], MatrixSelector)
        if is_gauge(window.vector_selector) != (call.func.name == "deriv")
    ]
    assert offenders == []


def test_the_total_of_a_counter_is_shown_only_as_a_number():
    """As a line it only rises, and falls to 0 at a restart."""

    def totals(expression):
        windows = {each.vector_selector.name for each in nodes(expression, MatrixSelector)}
        selectors = [each for each in nodes(expression, VectorSelector) if each.name]
        return {each.name for each in selectors if not is_gauge(each)} - windows

    numbers = {Kind.STAT, Kind.TABLE}
    offenders = [
        name for name, panel, _, each in PARSED if totals(each) and panel.kind not in numbers
    ]
    assert offenders == []


def test_a_quantile_is_taken_of_rates_of_buckets_by_their_bound():
    offenders = [
        name
        for name, _, _, expression in PARSED
        for call in calls(expression, "histogram_quantile")
        if "le" not in call.args[1].modifier.labels
        or not all(each.name.endswith("_bucket") for each in nodes(call.args[1], VectorSelector))
    ]
    assert offenders == []


def test_a_heatmap_counts_by_the_bound_of_the_bucket_alone():
    heatmaps = [each for each in PARSED if each[1].kind is Kind.HEATMAP]
    offenders = [
        name
        for name, _, query, expression in heatmaps
        if query.legend != "{{le}}"
        or expression.modifier.labels != ["le"]
        or not calls(expression, "increase")
    ]
    assert heatmaps
    assert offenders == []


def test_a_legend_names_labels_that_the_answer_has():
    offenders = [
        name
        for name, _, query, expression in PARSED
        if not set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        <= {
            label
            for each in nodes(expression, AggregateExpr)
            for label in (each.modifier.labels if each.modifier else ())
        }
    ]
    assert offenders == []


def test_nothing_is_counted_twice_where_two_scrapes_see_one_process():
    """A sum is of values that `max` has reduced to one for each process."""
    offenders = [
        name
        for name, _, _, expression in PARSED
        for aggregate in nodes(expression, AggregateExpr)
        if str(aggregate.op) in {"sum", "avg", "count"}
        and not nodes(aggregate.expr, AggregateExpr)
        and any(each.name for each in nodes(aggregate.expr, VectorSelector))
    ]
    assert offenders == []


def test_every_other_metric_of_the_catalogue_is_on_a_board():
    """A number that no board shows is one that nobody looks at."""
    of_rules_and_variables = {
        "vcpo_learner_phase",
        "vcpo_mismatch_exceeded",
        "vcpo_run_certificate_end_timestamp_seconds",
        "vcpo_run_start_timestamp_seconds",
        "vcpo_run_startup_deadline_timestamp_seconds",
    }
    shown_by_another_number = {
        "vcpo_policy_version",  # by the versions that workers are behind
        "vcpo_rollout_weights_version",
        "vcpo_trajectories_consumed_total",  # by trained tokens and dropped trajectories
    }
    selectors = [each for _, _, _, text in PARSED for each in nodes(text, VectorSelector)]
    shown = {metric.name for each in selectors if (metric := metric_of(each))}
    assert METRICS.keys() - shown == of_rules_and_variables | shown_by_another_number


def test_what_a_query_needs_is_what_its_metrics_need():
    assert needs_of("max by (run) (vcpo_rollout_engine_waiting)") == "the engine vllm"
    assert needs_of("vcpo_operator_queue_depth") == "the operator as host"
    assert needs_of('vcpo_build_info{part="operator"}') == "the operator as host"
    assert needs_of("vcpo_ess_ratio and vcpo_policy_lag_steps_bucket") == ""


def test_most_queries_are_answered_by_any_run():
    queries = list(panel_queries(BOARDS, run="demo"))
    of_runs = [query for query in queries if query.board != "vcpo-operator"]
    assert sum(not query.needs for query in of_runs) > 0.8 * len(of_runs)


def test_every_variable_is_filled_in_and_an_unknown_one_is_refused():
    assert [name for name, _, _, text in QUERIES if re.search(r"\$[a-z_]", text)] == []
    with pytest.raises(ValueError, match="'step'"):
        filled("rate(x[$step])")


def test_the_queries_are_those_of_every_panel():
    listed = [(each.board, each.panel_id) for each in panel_queries(BOARDS, run="demo")]
    expected = [
        (board.uid, panel.id) for board in BOARDS for panel in board.panels for _ in panel.queries
    ]
    assert listed == expected
