"""Each board can be read, drawn and answered: ids, units, texts, places, and valid PromQL."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.render_dashboards import FOLDER, rendered_files
from tests.fixtures.chart.rendering import CHART
from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.board import COLUMNS, AxisUnit, Kind, Row, places
from tools.monitoring.dashboards.marks import marks

MOST_PANELS = 25
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = [(board, panel) for board in BOARDS for panel in board.panels]


def drawn(dashboard):
    """The panels of a dashboard's JSON, rows among them."""
    return dashboard["panels"]


def sources(value):
    """Every reference to a data source anywhere in the JSON."""
    if isinstance(value, dict):
        if isinstance(found := value.get("datasource"), dict):
            yield found
        for each in value.values():
            yield from sources(each)
    if isinstance(value, list):
        for each in value:
            yield from sources(each)


@pytest.mark.parametrize(
    ("path", "text"), rendered_files().items(), ids=lambda each: str(each)[-20:]
)
def test_a_committed_dashboard_is_what_its_description_renders(path, text):
    assert path.read_text() == text, f"{path.name} is stale; cure: scripts/render_dashboards.py"


def test_no_dashboard_lies_there_without_a_description():
    assert DASHBOARDS.keys() == {board.uid for board in BOARDS}


def test_a_board_has_a_title_a_tag_to_be_found_by_and_few_enough_panels_to_read():
    offenders = [
        board.uid
        for board in BOARDS
        if "vcpo" not in board.tags
        or not board.title.startswith("VCPO / ")
        or not board.description.endswith("?")
        or len(board.panels) > MOST_PANELS
    ]
    assert offenders == []


def test_ids_and_slugs_are_unique_in_a_board():
    for board in BOARDS:
        ids = [row.id for row in board.rows] + [panel.id for panel in board.panels]
        slugs = [panel.slug for panel in board.panels]
        assert len(ids) == len(set(ids))
        assert len(slugs) == len(set(slugs))


def test_a_panels_id_names_its_row():
    """So that a panel that is added later takes the next number of its row."""
    offenders = [
        (board.uid, panel.id)
        for board in BOARDS
        for row in board.rows
        for panel in row.panels
        if not row.id < panel.id < row.id + 10
    ]
    assert offenders == []


def test_every_row_and_every_panel_asks_one_question_and_says_how_to_read_the_answer():
    rows = [row.question for board in BOARDS for row in board.rows]
    panels = [panel.question for _, panel in PANELS]
    assert [text for text in (*rows, *panels) if text.count("?") != 1 or text[-1] != "?"] == []
    assert len(panels) == len(set(panels))
    assert [panel.slug for _, panel in PANELS if not panel.reading.endswith(".")] == []


def test_every_panel_that_is_drawn_has_a_unit_a_description_and_a_title():
    offenders = [
        (uid, panel["id"])
        for uid, dashboard in DASHBOARDS.items()
        for panel in drawn(dashboard)
        if panel["type"] != "row"
        and not (
            panel["title"]
            and panel["description"]
            and panel["fieldConfig"]["defaults"]["unit"]
            and panel["targets"]
        )
    ]
    assert offenders == []


def test_axes_of_shares_counts_and_times_begin_at_zero():
    """Else a small change looks like a large one."""
    units = {
        AxisUnit.SHARE,
        AxisUnit.COUNT,
        AxisUnit.PER_SECOND,
        AxisUnit.SECONDS,
        AxisUnit.BYTES,
        AxisUnit.STEPS,
    }
    offenders = [panel.slug for _, panel in PANELS if panel.unit in units and panel.minimum != 0]
    assert offenders == []


def test_shares_end_at_one():
    offenders = [
        panel.slug
        for _, panel in PANELS
        if panel.unit is AxisUnit.SHARE and panel.kind is Kind.LINES and panel.maximum != 1
    ]
    assert offenders == []


def test_every_query_asks_the_data_source_that_the_reader_chose():
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for dashboard in DASHBOARDS.values():
        found = [each for each in sources(dashboard) if each.get("type") != "grafana"]
        assert found
        assert [each for each in found if each != wanted] == []


def test_the_variables_are_data_source_cluster_namespace_and_run():
    for board in BOARDS:
        names = [each["name"] for each in DASHBOARDS[board.uid]["templating"]["list"]]
        assert names == ["datasource", "cluster", "namespace", *(["run"] if board.has_run else [])]


def test_all_namespaces_include_the_empty_one_of_a_local_run():
    for dashboard in DASHBOARDS.values():
        values = {each["name"]: each for each in dashboard["templating"]["list"]}
        everything = values["namespace"]["allValue"]
        assert re.fullmatch(everything, "")
        assert re.fullmatch(everything, "team-a")


def test_what_happened_to_a_run_is_marked_on_every_board():
    for dashboard in DASHBOARDS.values():
        found = {each["name"]: each for each in dashboard["annotations"]["list"]}
        assert found.keys() == {"Throttles", "Restarts", "Critical", "Rollbacks", "Alerts"}
        assert all(each["titleFormat"] and each["expr"] for each in found.values())


def test_no_two_panels_overlap_and_none_leaves_the_grid():
    for dashboard in DASHBOARDS.values():
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in drawn(dashboard))
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert {x for x, _ in cells} == set(range(COLUMNS))


@pytest.mark.parametrize(
    ("kinds", "widths"),
    [
        ("l", [24]),
        ("ll", [12, 12]),
        ("llll", [12, 12, 12, 12]),
        ("lllll", [8, 8, 8, 12, 12]),
        ("lllllll", [8, 8, 8, 12, 12, 12, 12]),
        ("tl", [24, 24]),
        ("llt", [12, 12, 24]),
    ],
)
def test_a_line_has_two_or_three_panels_and_a_table_one_of_its_own(kinds, widths):
    drawn_as = {"l": Kind.LINES, "t": Kind.TABLE}
    model = BOARDS[0].panels[0]
    panels = tuple(replace(model, kind=drawn_as[each]) for each in kinds)
    row = Row(id=10, question="Is it there?", panels=panels)
    assert [place.width for _, place in places(row, 1)] == widths


def test_panels_stand_in_the_order_of_their_description_without_gaps():
    for board in BOARDS:
        panels = drawn(DASHBOARDS[board.uid])
        order = [each for row in board.rows for each in (row.id, *(p.id for p in row.panels))]
        assert [panel["id"] for panel in panels] == order
        positions = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in panels]
        assert positions == sorted(positions)
        lines = {
            y
            for p in panels
            for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
        }
        assert lines == set(range(max(lines) + 1))


def test_rates_and_increases_are_taken_over_the_interval_that_grafana_computes():
    """A fixed window shows nothing where scrapes are rarer, and hides peaks where they are not.

    Shares of what happens once a step are of an hour, as the alerts' are.
    """
    expressions = [query.expression for _, panel in PANELS for query in panel.queries]
    expressions += [mark.expression for board in BOARDS for mark in marks(board)]
    windows = list(
        itertools.chain(
            *(
                re.findall(r"(rate|increase)\((?:[^()]|\{[^}]*\})*\[([^\]]+)\]", each)
                for each in expressions
            )
        )
    )
    assert windows
    assert {window for _, window in windows} == {"$__rate_interval", "1h"}


def test_every_alert_links_to_a_panel_that_exists():
    known = {f"/d/{board.uid}?viewPanel={panel.id}" for board, panel in PANELS}
    text = Path(CHART / "files" / "rules.yaml").read_text()
    links = re.findall(r"dashboard_url: ([^&\s]+)", text)
    assert len(links) >= text.count("- alert:") > 0
    assert {link for link in links if link not in known} == set()
