"""A heat map of two rows and two columns in squares of 50 pixels."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from vcpo_study.results.drawing.plot import Size
from vcpo_study.results.heat_map import HeatMap, draw_heat_map

SIZE = Size(width=120, height=130, left=10, right=10, top=10, bottom=20)
"""The map is 100 by 100 pixels, from (10, 10) to (110, 110)."""
MAP = HeatMap(
    title="<t>",
    x_title="lag",
    y_title="rate",
    rows=("0.001", "0.0001"),
    columns=("0", "32"),
    values={(0, 0): 0.0, (0, 1): 0.25, (1, 0): 0.5},
    full=0.5,
    framed=frozenset({(1, 0)}),
    chosen_row=1,
)


@pytest.fixture
def drawn():
    return ET.fromstring(f"<svg>{draw_heat_map(MAP, SIZE)}</svg>")


def texts(root, name):
    return [each.text for each in root.iter("text") if name in each.get("class").split()]


def test_each_number_stands_at_its_row_and_column(drawn):
    places = [(each.get("x"), each.get("y"), each.text) for each in drawn.iter("text")
              if "cell" in each.get("class").split()]  # fmt: skip
    assert places == [("35", "38.5", "0.00"), ("85", "38.5", "0.25"), ("35", "88.5", "0.50")]


def test_the_ground_is_darker_where_the_number_is_larger(drawn):
    grounds = [each.get("fill") for each in drawn.iter("rect") if each.get("fill")]
    assert grounds == ["#f7fbff", "#6baed6", "#08306b"]


def test_a_color_between_two_of_the_ramp_is_half_of_each():
    # Halfway from (247, 251, 255) to (107, 174, 214).
    half = replace(MAP, values={(0, 0): 0.125})
    assert 'fill="#b1d4ea"' in draw_heat_map(half, SIZE)


def test_numbers_above_the_full_value_are_as_dark_as_it():
    assert 'fill="#08306b"' in draw_heat_map(replace(MAP, values={(0, 0): 0.9}), SIZE)


def test_letters_on_a_dark_ground_are_told(drawn):
    assert texts(drawn, "on-dark") == ["0.50"]


def test_the_places_asked_for_have_a_frame(drawn):
    (frame,) = [each for each in drawn.iter("rect") if each.get("class") == "framed"]
    assert [frame.get(name) for name in ("x", "y", "width", "height")] == [
        "11.5",
        "61.5",
        "47",
        "47",
    ]


def test_labels_stand_beside_their_rows_and_the_chosen_one_is_told(drawn):
    assert texts(drawn, "y-tick") == ["0.001", "0.0001"]
    assert texts(drawn, "chosen") == ["0.0001"]
    assert texts(drawn, "x-tick") == ["0", "32"]
    titles = [texts(drawn, name) for name in ("plot-title", "x-title", "y-title")]
    assert titles == [["<t>"], ["lag"], ["rate"]]
