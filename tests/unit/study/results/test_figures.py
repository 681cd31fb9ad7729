"""Figures: well-formed, and with what they are about in them."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from tests.fixtures.study import record, steps, study
from vcpo_study.results.drawing.plot import AxisScale, Plot, draw_plot
from vcpo_study.results.drawing.sheet import COLORS, PANEL, colored_curve, draw_sheet
from vcpo_study.results.figures import figures
from vcpo_study.results.summary import claim_records, summarize

SVG = "{http://www.w3.org/2000/svg}"
TUNING = [
    record(method, 0, [0.2, 0.8], seed=101, learning_rate=rate)
    for method in ("vcpo", "plain")
    for rate in (1e-4, 1e-3)
]
"""The target is 0.76, and every synchronous rate 1e-4."""
CLAIMS = [
    record("vcpo", 0, [0.2, 0.9, 0.9]),
    record("vcpo", 32, [0.2, 0.8, 0.9, 0.9, 0.9]),
    record("plain", 0, [0.2, 0.9, 0.9]),
    record("plain", 32, [0.2, 0.9, 0.1, 0.1, 0.1]),
]
PLANE = [record("vcpo", 32, [0.6], learning_rate=1e-3)]
RECORDS = [*TUNING, *CLAIMS, *PLANE]


def draw(name, records=RECORDS):
    summary = summarize(study(), records)
    claims = claim_records(study(), records, summary.tuned)
    return ET.fromstring(figures(study(), summary, claims)[name])


def texts(figure, name=None):
    found = list(figure.iter(f"{SVG}text"))
    return [each.text for each in found if name is None or name in each.get("class").split()]


def lines(figure, color):
    """Curves of a color, with neither the bars of ranges nor the legend's samples."""
    paths = [path for path in figure.iter(f"{SVG}path") if path.get("stroke") == color]
    return [path for path in paths if not set("Vh") & set(path.get("d"))]


def test_each_method_with_a_point_of_the_plane_has_a_heat_map():
    assert texts(draw("heat_maps.svg"), "plot-title") == ["VCPO", "plain"]
    of_vcpo = [each for each in RECORDS if each.method == "vcpo"]
    assert texts(draw("heat_maps.svg", of_vcpo), "plot-title") == ["VCPO"]


def test_a_heat_map_has_the_highest_rate_on_top_and_frames_what_reaches_the_target():
    figure = draw("heat_maps.svg")
    assert texts(figure, "y-tick")[:2] == ["0.001", "0.0001"]
    assert texts(figure, "x-tick")[:3] == ["0", "32", "128"]
    # At lag 0 the cells of the tuning; at lag 32 seed 1, of plain at one rate.
    of_vcpo, of_plain = ["0.80", "0.60", "0.80", "0.90"], ["0.80", "0.80", "0.10"]
    assert texts(figure, "cell") == [*of_vcpo, *of_plain]
    assert len([each for each in figure.iter(f"{SVG}rect") if each.get("class") == "framed"]) == 5


def test_the_synchronous_rate_is_bold():
    assert texts(draw("heat_maps.svg"), "chosen") == ["0.0001", "0.0001"]


def test_collapse_accuracy_and_safe_rates_have_a_point_for_each_lag():
    figure = draw("by_lag.svg")
    collapse, final, safe = lines(figure, COLORS[0])
    assert [each.get("d").count(" ") for each in (collapse, final, safe)] == [2, 2, 2]
    # All rates of the other method were not run, so it has no safe rates.
    assert len(lines(figure, COLORS[1])) == 2


def test_learning_curves_have_a_panel_for_each_lag_and_a_curve_for_each_method():
    figure = draw("accuracy.svg")
    assert texts(figure, "plot-title") == ["k = 0", "k = 32"]
    assert len(lines(figure, COLORS[0])) == len(lines(figure, COLORS[1])) == 2


def test_weights_have_two_quantiles_and_the_ess_of_each_method_at_each_lag_above_0():
    figure = draw("weights.svg")
    assert texts(figure, "plot-title") == [
        "k = 32: 1 % and 99 % of log weights",
        "k = 32: ESS over trajectories",
    ]
    assert len(lines(figure, COLORS[0])) == len(lines(figure, COLORS[1])) == 3


def test_weights_that_count_for_nothing_do_not_stretch_the_axis():
    gone = record("vcpo", 32, [0.2, 0.1], seed=2)
    gone = replace(gone, steps=steps(10, log_weights=((-900.0,) * 7 + (3.0,),) * 10))
    labels = texts(draw("weights.svg", [*RECORDS, gone]), "y-tick")
    assert min(float(label) for label in labels) == -20.0


def test_the_legend_names_methods_that_have_claims():
    only_one = [each for each in RECORDS if each.method == "vcpo"]
    assert {"VCPO", "plain"} <= set(texts(draw("accuracy.svg")))
    assert "plain" not in texts(draw("accuracy.svg", only_one))


@pytest.mark.parametrize("name", ["heat_maps.svg", "by_lag.svg", "accuracy.svg", "weights.svg"])
def test_a_study_without_a_cell_is_drawn_empty(name):
    assert lines(draw(name, []), COLORS[0]) == []


def test_values_stand_where_the_axes_say():
    scale = AxisScale(low=0.0, high=1.0, ticks=())
    curve = colored_curve([(0.0, 0.0), (1.0, 1.0)], "#000", bars=((0.5, 0.0, 1.0),), has_dots=True)
    plot = draw_plot(Plot(title="<t>", x=scale, y=scale, curves=(curve,)), PANEL)
    figure = ET.fromstring(draw_sheet([plot], [], columns=1, about="a & b"))
    # The plot area is 54..296 pixels wide and 172..26 pixels high.
    line, bar = [path for path in figure.iter(f"{SVG}path") if path.get("stroke") == "#000"]
    assert (line.get("d"), bar.get("d")) == ("M54 172L296 26", "M175 172V26")
    assert [(c.get("cx"), c.get("cy")) for c in figure.iter(f"{SVG}circle")] == [
        ("54", "172"),
        ("296", "26"),
    ]
    assert texts(figure)[0] == "<t>"
    assert figure.get("aria-label") == "a & b"
