"""Figures: well-formed, and with what they are about in them."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tests.fixtures.study import record, study
from vcpo_study.results.figures import figures
from vcpo_study.results.plot import AxisScale, Plot
from vcpo_study.results.sheet import COLORS, colored_curve, draw_sheet
from vcpo_study.results.summary import grid_rows

SVG = "{http://www.w3.org/2000/svg}"
RECORDS = [
    record("vcpo", 0, [0.2, 0.9, 0.9]),
    record("vcpo", 32, [0.2, 0.8, 0.9]),
    record("plain", 0, [0.2, 0.9, 0.9]),
    record("plain", 32, [0.2, 0.9, 0.1]),
]


def draw(name, records=RECORDS):
    return ET.fromstring(figures(study(), records, grid_rows(records))[name])


def texts(figure):
    return [element.text for element in figure.iter(f"{SVG}text")]


def lines(figure, color):
    """Curves of a color, with neither the bars of ranges nor the legend's samples."""
    paths = [path for path in figure.iter(f"{SVG}path") if path.get("stroke") == color]
    return [path for path in paths if not set("Vh") & set(path.get("d"))]


def test_there_is_a_panel_for_each_lag():
    figure = draw("accuracy.svg")
    assert [text for text in texts(figure) if text.startswith("k = ")] == ["k = 0", "k = 32"]
    assert len(lines(figure, COLORS[0])) == len(lines(figure, COLORS[1])) == 2


def test_the_legend_names_methods_that_have_cells():
    only_one = [each for each in RECORDS if each.method == "vcpo"]
    assert {"VCPO", "plain"} <= set(texts(draw("accuracy.svg")))
    assert "plain" not in texts(draw("accuracy.svg", only_one))


def test_the_final_accuracy_has_a_point_for_each_lag():
    figure = draw("final.svg")
    mean, worst = lines(figure, COLORS[0])
    assert mean.get("d").count(" ") == worst.get("d").count(" ") == 2  # one in each point
    assert {"0", "32"} <= set(texts(figure))


def test_only_cells_that_fell_are_shown_before_a_fall():
    figure = draw("before_falls.svg")
    assert "Gradient norm (1 cell)" in texts(figure)
    # In each of the three panels the cell, and the median over cells.
    assert len(lines(figure, COLORS[1])) == 3 * 2
    assert lines(figure, COLORS[0]) == []


@pytest.mark.parametrize("name", ["accuracy.svg", "final.svg", "before_falls.svg"])
def test_a_study_without_a_cell_is_drawn_empty(name):
    assert lines(draw(name, []), COLORS[0]) == []


def test_values_stand_where_the_axes_say():
    scale = AxisScale(low=0.0, high=1.0, ticks=())
    curve = colored_curve([(0.0, 0.0), (1.0, 1.0)], "#000", bars=((0.5, 0.0, 1.0),), has_dots=True)
    plot = Plot(title="<t>", x=scale, y=scale, curves=(curve,))
    figure = ET.fromstring(draw_sheet([plot], [], columns=1, about="a & b"))
    # The plot area is 48..290 pixels wide and 172..26 pixels high.
    line, bar = [path for path in figure.iter(f"{SVG}path") if path.get("stroke") == "#000"]
    assert (line.get("d"), bar.get("d")) == ("M48 172L290 26", "M169 172V26")
    assert [(c.get("cx"), c.get("cy")) for c in figure.iter(f"{SVG}circle")] == [
        ("48", "172"),
        ("290", "26"),
    ]
    assert texts(figure)[0] == "<t>"
    assert figure.get("aria-label") == "a & b"
