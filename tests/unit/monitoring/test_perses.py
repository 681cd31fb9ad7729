"""A board for Perses shows the panels of its description, for one run, with no variable left."""

from __future__ import annotations

import json
import re

import pytest

from tests.fixtures.chart.rendering import ROOT
from vcpo_monitoring.dashboards import BOARDS
from vcpo_monitoring.dashboards.board import Kind, Role
from vcpo_monitoring.dashboards.perses import picture_height, to_perses

OFF_POLICY = BOARDS[0]


def drawn(board, rows=frozenset()):
    return to_perses(board, run="demo", namespace="ml", interval="8s", rows=rows)


def panel_of(slug):
    return drawn(OFF_POLICY)["spec"]["panels"][slug]["spec"]


def test_every_panel_but_a_table_is_there_once_and_in_a_place():
    for board in BOARDS:
        spec = drawn(board)["spec"]
        items = [item for layout in spec["layouts"] for item in layout["spec"]["items"]]
        places = [item["content"]["$ref"].removeprefix("#/spec/panels/") for item in items]
        expected = [panel.slug for panel in board.panels if panel.kind is not Kind.TABLE]
        assert places == expected == list(spec["panels"])


def test_no_variable_of_grafana_is_left():
    for board in BOARDS:
        assert not re.search(r"\$[a-z_]+[^/\"]", json.dumps(drawn(board)["spec"]["panels"]))


def test_a_row_can_be_drawn_alone():
    spec = drawn(OFF_POLICY, frozenset({20}))["spec"]
    assert [each["spec"]["display"]["title"] for each in spec["layouts"]] == [
        "Why is it off-policy?"
    ]
    assert len(spec["panels"]) == 5


def test_a_picture_is_as_high_as_its_rows_together():
    heights = [picture_height(drawn(OFF_POLICY, frozenset({row.id}))) for row in OFF_POLICY.rows]
    assert picture_height(drawn(OFF_POLICY)) == sum(heights)


def test_a_limit_is_a_dashed_line():
    settings = panel_of("lag-limits")["plugin"]["spec"]["querySettings"]
    dashed = {each["queryIndex"] for each in settings if each["lineStyle"] == "dashed"}
    queries = next(panel for panel in OFF_POLICY.panels if panel.slug == "lag-limits").queries
    limits = {n for n, query in enumerate(queries) if query.role in {Role.LIMIT, Role.REFERENCE}}
    assert dashed == limits == {2, 3}


def test_a_logarithmic_axis_is_the_logarithm_and_says_so():
    panel = panel_of("divergence")
    assert panel["queries"][0]["spec"]["plugin"]["spec"]["query"].startswith("log10(max by")
    assert panel["plugin"]["spec"]["yAxis"]["label"] == "log10 nats"


def test_bands_are_lines_at_their_starts():
    thresholds = panel_of("collapse-warning")["plugin"]["spec"]["thresholds"]
    assert [each["value"] for each in thresholds["steps"]] == pytest.approx([1 / 3, 2 / 3])


def test_panels_that_perses_lacks_are_those_of_the_page():
    page = (ROOT / "monitoring" / "perses" / "board.jsx").read_text()
    own = {"BucketsChart": Kind.HEATMAP, "NamesChart": Kind.NAMES}
    for board in BOARDS:
        panels = drawn(board)["spec"]["panels"]
        kinds = {
            panels[panel.slug]["spec"]["plugin"]["kind"]: panel.kind
            for panel in board.panels
            if panel.slug in panels
        }
        assert {name: kind for name, kind in kinds.items() if name in own}.items() <= own.items()
    assert all(f'name: "{name}"' in page for name in own)
