"""Each board is drawn as described, and asks in valid PromQL for what somebody exports."""

import json
import re
from itertools import chain

import promql_parser
import pytest
from promql_parser import AggregateExpr, Call, MatrixSelector, VectorSelector

from scripts.render_manifests import DASHBOARDS as FOLDER
from scripts.render_manifests import ROOT, dashboards
from tests.fixtures.observation.panels import filled_in, panel_queries
from tests.fixtures.promql import metric_of, unknown_names
from tools.monitoring.catalogue import ALL, metric_usage
from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.board import COLUMNS, AxisUnit, Kind
from tools.monitoring.dashboards.grafana import marks
from tools.monitoring.rules import RULES_FILE

MOST_PANELS = 48
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
QUERIES = [
    (f"{uid}/{panel.id}: {query.legend}", panel, query, filled(query.expression))
    for uid, panel, query in panel_queries()
    for filled in [lambda text: filled_in(text, run="demo", namespace="")]
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


def is_gauge(selector):
    metric = metric_of(selector.name or "")
    return metric.kind == "gauge" if metric else selector.name == "process_resident_memory_bytes"


@pytest.mark.parametrize(("path", "text"), dashboards().items(), ids=lambda each: str(each)[-20:])
def test_a_committed_dashboard_is_what_its_description_renders(path, text):
    assert path.read_text() == text, "run python -m scripts.render_manifests"


def test_there_are_few_enough_panels_to_read_with_ids_of_their_rows():
    assert sum(len(board.panels) for board in BOARDS) <= MOST_PANELS
    for board in BOARDS:
        ids = [row.id for row in board.rows] + [panel.id for panel in board.panels]
        assert len(ids) == len(set(ids))
        assert all(row.id < each.id < row.id + 10 for row in board.rows for each in row.panels)


def test_no_two_panels_overlap_and_none_leaves_the_grid():
    for dashboard in DASHBOARDS.values():
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in dashboard["panels"])
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert {x for x, _ in cells} == set(range(COLUMNS))


def test_axes_of_shares_counts_and_times_begin_at_zero():
    """Else a small change looks like a large one."""
    free = {AxisUnit.NUMBER, AxisUnit.NATS, AxisUnit.VERSIONS, AxisUnit.TOKENS}
    panels = [panel for board in BOARDS for panel in board.panels]
    assert [each.title for each in panels if each.unit not in free and each.minimum != 0] == []


def test_all_namespaces_include_the_empty_one_of_a_local_run():
    for dashboard in DASHBOARDS.values():
        values = {each["name"]: each for each in dashboard["templating"]["list"]}
        assert re.fullmatch(values["namespace"]["allValue"], "")


def test_every_metric_label_and_value_of_a_query_exists():
    faults = {name: unknown_names(text) for name, _, _, text in QUERIES}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    texts = [each for board in BOARDS for each in marks(board) if each.name != "Alerts"]
    filled = [filled_in(each.expression, run="demo", namespace="") for each in texts]
    assert list(chain.from_iterable(map(unknown_names, filled))) == []


def test_rates_are_of_counters_and_slopes_of_gauges():
    offenders = [
        name
        for name, _, _, expression in PARSED
        for call in calls(expression, "rate", "increase", "deriv")
        for window in nodes(call.args[0], MatrixSelector)
        if is_gauge(window.vector_selector) != (call.func.name == "deriv")
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
    assert heatmaps
    assert [name for name, _, _, each in heatmaps if each.modifier.labels != ["le"]] == []


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


def test_every_metric_has_a_board_or_an_alert_that_reads_it():
    usage = metric_usage(frozenset(metric.name for metric in ALL))
    unread = {name for name, found in usage.items() if not (found.boards or found.alerts)}
    assert unread == {"vcpo_policy_version"}, "the operator reads it, with signals by Prometheus"
    assert "vcpo-off-policy" in usage["vcpo_policy_lag_steps"].boards  # by its buckets
    assert "VCPOEffectiveSampleSizeLow" in usage["vcpo_ess_mean_ratio"].alerts  # by a recording


def test_every_link_to_a_board_names_a_panel_of_it():
    texts = [RULES_FILE, *(ROOT / "docs").rglob("*.md"), *FOLDER.glob("*.json")]
    pattern = re.compile(r"/d/([\w-]+)\?viewPanel=(\d+)")
    links = [link for path in texts for link in pattern.findall(path.read_text())]
    known = {(board.uid, str(panel.id)) for board in BOARDS for panel in board.panels}
    assert len(links) > 50
    assert set(links) - known == set()
