import math
from xml.etree import ElementTree as ET

from vcpo_study.results.drawing.plot import AxisScale, Curve, Plot, Size, draw_plot, points, runs

SIZE = Size(width=120, height=130, left=10, right=10, top=10, bottom=20)
"""The plot area is 100 by 100 pixels, from (10, 10) to (110, 110)."""


def drawn(pairs, *, dots=None):
    x = AxisScale(low=pairs[0][0], high=pairs[-1][0], ticks=())
    y = AxisScale(low=0.0, high=1.0, ticks=((0.5, "<b>half</b>"),))
    curve = Curve(points=points(pairs), attributes={"class": "curve"}, dots=dots or {})
    return ET.fromstring(f"<svg>{draw_plot(Plot(x=x, y=y, curves=(curve,)), SIZE)}</svg>")


def path_of(root):
    return next(path.get("d") for path in root.iter("path") if path.get("class") == "curve")


def test_values_are_drawn_where_the_axes_say():
    assert path_of(drawn([(0, 0.0), (10, 0.5)])) == "M10 110L110 60"


def test_a_gap_interrupts_the_line():
    pairs = [(0, 0), (1, 1), (2, None), (3, 1), (4, 0)]
    assert path_of(drawn(pairs)) == "M10 110L35 10M85 10L110 110"


def test_a_lone_point_is_drawn_as_a_dot():
    assert path_of(drawn([(0, 0), (1, None), (2, 1)])) == "M10 110h0M110 10h0"


def test_every_point_of_a_dotted_curve_has_its_spot():
    root = drawn([(0, 0.1), (1, None), (2, 0.5)], dots={"r": "2"})
    assert len(list(root.iter("circle"))) == 2


def test_a_label_is_text_and_no_markup():
    (label,) = [text.text for text in drawn([(0, 0), (1, 1)]).iter("text")]
    assert label == "<b>half</b>"


def test_numbers_that_cannot_be_drawn_become_gaps():
    curve = points([(1, 0.5), (2, math.nan), (3, math.inf), (4, None), (5, 1e308)])
    assert [y for _, y in curve] == [0.5, None, None, None, None]


def test_a_curve_falls_into_runs_between_its_gaps():
    curve = points([(1, None), (2, 5.0), (3, 6.0), (4, None), (5, None), (6, 7.0)])
    assert list(runs(curve)) == [[(2, 5.0), (3, 6.0)], [(6, 7.0)]]
