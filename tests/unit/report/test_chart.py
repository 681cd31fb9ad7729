import re
from xml.etree import ElementTree as ET

import pytest

from vcpo.report.chart import SMALL, Chart, Horizon, Mark, Series, SeriesStyle, draw_chart, plot_of
from vcpo.report.plot import Size
from vcpo.report.readout import readout_of
from vcpo.report.series import points

SIZE = Size(width=120, height=130, left=10, right=10, top=10, bottom=20)
"""The plot area is 100 by 100 pixels, from (10, 10) to (110, 110)."""


def chart_of(pairs, *, marks=(), style=SeriesStyle.LINE, label="reward", **changes):
    steps = [int(x) for x, _ in pairs] or [0]
    fields = {
        "name": "reward",
        "title": "Reward",
        "unit": "mean",
        "caption": "Should rise.",
        "series": (Series(label=label, points=points(pairs), style=style),),
        "horizon": Horizon(first_step=min(steps), last_step=max(steps), marks=marks),
    }
    return Chart(**{**fields, **changes})


def paths_of(svg, name):
    return [
        path.get("d") for path in ET.fromstring(svg).iter("path") if name in path.get("class", "")
    ]


def test_values_are_drawn_where_the_axes_say():
    chart = chart_of([(0, 0.0), (10, 1.0)], y_low=0.0, y_high=2.0)
    assert paths_of(draw_chart(chart, SIZE), "ink-main") == ["M10 110L110 60"]


def test_a_gap_interrupts_the_line():
    chart = chart_of([(0, 0), (1, 1), (2, None), (3, 1), (4, 0)], y_low=0.0, y_high=1.0)
    assert paths_of(draw_chart(chart, SIZE), "ink-main") == ["M10 110L35 10M85 10L110 110"]


def test_a_lone_point_is_drawn_as_a_dot():
    chart = chart_of([(0, 0), (1, None), (2, 1)], y_low=0.0, y_high=1.0)
    assert paths_of(draw_chart(chart, SIZE), "ink-main") == ["M10 110h0M110 10h0"]


def test_every_evaluation_has_its_spot():
    svg = draw_chart(chart_of([(0, 0.1), (25, 0.4), (50, 0.5)], style=SeriesStyle.DOTS))
    assert len(list(ET.fromstring(svg).iter("circle"))) == 3


def test_an_empty_chart_says_so():
    assert "no data yet" in draw_chart(chart_of([]))
    assert "no data yet" in draw_chart(chart_of([(1, None), (2, float("nan"))]))


def test_a_chart_with_data_does_not_claim_to_be_empty():
    assert "no data yet" not in draw_chart(chart_of([(1, 0.5)]))


@pytest.mark.parametrize("num_points", [0, 1, 2, 10_000])
def test_any_number_of_points_makes_well_formed_svg_without_stray_numbers(num_points):
    svg = draw_chart(chart_of([(step, step * 0.1) for step in range(1, num_points + 1)]), SMALL)
    assert ET.fromstring(svg).tag == "svg"
    assert not re.search(r"\b(nan|inf|None)\b", svg)


def test_ten_thousand_points_are_thinned_to_what_a_screen_can_show():
    chart = chart_of([(step, step % 7) for step in range(10_000)])
    (line,) = paths_of(draw_chart(chart), "ink-main")
    assert line.count(" ") <= 2 * 500


def test_events_are_marked_below_the_chart_and_described_in_words():
    marks = (Mark(step=5, label="step 5 skipped: <b>loss</b> is not finite"),)
    svg = draw_chart(chart_of([(0, 1), (10, 2)], marks=marks), SIZE)
    assert paths_of(svg, "mark") == ["M60 110l-4 7h8z"]
    assert "step 5 skipped: &lt;b&gt;loss" in svg


def test_marks_on_the_same_pixel_are_drawn_once():
    marks = tuple(Mark(step=step, label="skipped") for step in range(0, 10_000, 2))
    chart = chart_of([(0, 1), (10_000, 2)], marks=marks)
    assert len(paths_of(draw_chart(chart, SIZE), "mark")) <= 1001


def test_a_hostile_title_stays_inside_its_attribute():
    svg = draw_chart(chart_of([(1, 1)], title='"><script>alert(1)</script>'))
    assert "<script" not in svg
    assert ET.fromstring(svg).get("aria-label").startswith('"><script>')


def test_steps_below_are_whole_numbers():
    plot = plot_of(chart_of([(1, 0.1), (3, 0.2)]))
    assert plot.x.ticks == ((1, "1"), (2, "2"), (3, "3"))


def test_a_fixed_range_is_kept_whatever_the_data():
    plot = plot_of(chart_of([(1, 0.4), (2, 0.5)], y_low=0.0, y_high=1.0))
    assert (plot.y.low, plot.y.high) == (0.0, 1.0)


def test_data_above_a_fixed_bottom_gets_room_at_the_top():
    plot = plot_of(chart_of([(1, 4.0), (2, 8.0)], y_low=0.0))
    assert plot.y.low == 0.0
    assert plot.y.high == pytest.approx(8.4)


def test_a_constant_zero_can_be_drawn_on_an_axis_that_starts_at_zero():
    plot = plot_of(chart_of([(1, 0), (2, 0)], y_low=0.0, whole_y=True))
    assert plot.y.ticks == ((0, "0"),)


def test_the_readout_holds_the_drawn_axis_and_the_known_points():
    readout = readout_of(chart_of([(0, 0.123456789), (5, None), (10, 2)]), SIZE)
    assert readout == {
        "low": 0,
        "high": 10,
        "left": 10,
        "right": 110,
        "width": 120,
        "series": [{"label": "reward", "ink": "ink-main", "x": [0, 10], "y": [0.12346, 2.0]}],
    }
