"""Every board is a dashboard by Grafana's own schema, and every link to one leads there.

Not seen by the schema: options of a transformation, the query of a variable, and whether the name
of a unit, of a calculation or of a colour is one that Grafana knows.
"""

from __future__ import annotations

import copy
import json
import re

import pytest

from scripts.render_dashboards import FOLDER, ROOT
from tests.fixtures.observation.grafana_schema import faults
from tools.monitoring.dashboards import BOARDS

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
OF_PROMETHEUS = re.compile(r"\.annotations\.list\[\d+\]\.(titleFormat|step) is unknown")
"""Fields of an annotation that its data source reads; the schema has only those of all sources."""
each_board = pytest.mark.parametrize("uid", DASHBOARDS)


def unexplained(dashboard):
    return [fault for fault in faults(dashboard) if not OF_PROMETHEUS.fullmatch(fault)]


def panels_of(dashboard, kind):
    return [panel for panel in dashboard["panels"] if panel["type"] == kind]


@each_board
def test_a_board_is_a_dashboard_by_grafanas_own_schema(uid):
    assert unexplained(DASHBOARDS[uid]) == []


def changed(change):
    """What is wrong with a board of which something was changed."""
    dashboard = copy.deepcopy(DASHBOARDS["vcpo-off-policy"])
    change(dashboard, panels_of(dashboard, "timeseries")[0])
    return unexplained(dashboard)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda board, panel: board.update(titel="x"), ".titel is unknown"),
        (lambda board, panel: board.update(tags="vcpo"), ".tags is 'vcpo', no list"),
        (lambda board, panel: board.update(graphTooltip=7), ".graph_tooltip is 7"),
        (lambda board, panel: panel["gridPos"].update(w="half"), ".grid_pos.w is 'half', no int"),
        (lambda board, panel: panel["options"].update(legnd={}), ".options.legnd is unknown"),
        (
            lambda board, panel: panel["fieldConfig"]["defaults"]["custom"].update(
                drawStyle="dots"
            ),
            ".custom.draw_style is 'dots', no GraphDrawStyle",
        ),
        (
            lambda board, panel: panel["fieldConfig"]["overrides"][0]["properties"].append(
                {"id": "custom.lineWdth", "value": 1}
            ),
            ".custom.lineWdth is unknown",
        ),
        (
            lambda board, panel: panel["fieldConfig"]["overrides"][0]["properties"].append(
                {"id": "custom.lineStyle", "value": {"fill": "wavy"}}
            ),
            ".line_style.fill is 'wavy'",
        ),
        (lambda board, panel: panel["targets"][0].update(expresion="up"), ".expresion is unknown"),
    ],
)
def test_a_field_or_a_value_that_the_schema_lacks_is_named(change, fault):
    found = changed(change)
    assert any(fault in each for each in found), found


def linked(folder, *endings):
    """Every link to a board in the files of a folder: its file, uid and query."""
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in endings:
            for uid, query in re.findall(r"/d/([\w-]+)\??([^\n\"'`)]*)", path.read_text()):
                yield path.relative_to(ROOT).as_posix(), uid, query


def test_every_link_to_a_board_names_one_with_its_panel_and_variables():
    links = [
        *linked("charts", ".json", ".yaml", ".txt", ".tpl", ".md"),
        *linked("docs", ".md"),
        *linked("core", ".py"),
        *linked("operator", ".py"),
    ]
    panels = {board.uid: {str(panel.id) for panel in board.panels} for board in BOARDS}
    variables = {
        uid: {each["name"] for each in board["templating"]["list"]}
        for uid, board in DASHBOARDS.items()
    }
    offenders = [
        (path, uid, query)
        for path, uid, query in links
        if uid not in panels
        or not set(re.findall(r"viewPanel=(\d+)", query)) <= panels[uid]
        or not set(re.findall(r"var-(\w+)=", query)) <= variables[uid]
    ]
    assert len(links) > 50
    assert offenders == []


def test_every_board_links_to_the_others_by_a_tag_that_they_have():
    for dashboard in DASHBOARDS.values():
        (link,) = dashboard["links"]
        assert link["type"] == "dashboards"
        assert all(set(link["tags"]) <= set(each["tags"]) for each in DASHBOARDS.values())


def test_every_runbook_that_is_linked_to_is_a_file():
    text = (ROOT / "charts" / "vcpo" / "files" / "rules.yaml").read_text()
    paths = set(re.findall(r"runbook_url: (\S+)", text))
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).is_file()] == []
