import json

from vcpo.report.charts.chart import Chart, Curve, CurveStyle, Heatmap, Mark, Table
from vcpo.report.charts.payload import MAX_ROWS, payload_of


def table_of(num_rows):
    steps = tuple(range(1, num_rows + 1))
    return Table(name="steps", steps=steps, times_s=tuple(step / 3 for step in steps))


def chart_of(values=(), **changes):
    fields = {"name": "ess", "title": "ESS", "unit": "share", "caption": "Should be high."}
    curve = Curve(label="ESS", table="steps", values=tuple(values))
    return Chart(**{**fields, "curves": (curve,), **changes})


def test_a_short_table_is_written_row_by_row():
    payload = payload_of([table_of(2)], [chart_of([0.123456789, None])])
    assert payload["tables"] == {"steps": {"rows": 1, "step": (1, 2), "time": [0.3, 0.7]}}
    assert payload["charts"][0]["curves"] == [
        {
            "label": "ESS",
            "ink": "ink-1",
            "style": "line",
            "table": "steps",
            "low": [0.12346, None],
        }
    ]


def test_a_count_stays_exact():
    (curve,) = payload_of([table_of(1)], [chart_of([1234567.0])])["charts"][0]["curves"]
    assert json.dumps(curve["low"]) == "[1234567]"


def test_a_long_table_is_thinned_to_least_and_most_of_each_bucket():
    values = [float(row % 3) for row in range(3 * MAX_ROWS)]
    values[-1] = 99.0
    payload = payload_of([table_of(len(values))], [chart_of(values)])
    (curve,) = payload["charts"][0]["curves"]
    assert payload["tables"]["steps"]["rows"] == 3
    assert payload["tables"]["steps"]["step"][:3] == (1, 4, 7)
    assert curve["low"] == [0] * MAX_ROWS
    assert curve["high"] == [2] * (MAX_ROWS - 1) + [99]


def test_a_smoothed_curve_of_buckets_is_their_mean():
    smooth = Curve(label="m", table="steps", values=(1.0, 2.0) * MAX_ROWS, is_smooth=True)
    payload = payload_of([table_of(2 * MAX_ROWS)], [chart_of(curves=(smooth,))])
    (curve,) = payload["charts"][0]["curves"]
    assert curve["low"] == [1.5] * MAX_ROWS
    assert "high" not in curve


def test_a_heatmap_shows_the_worst_of_each_bucket():
    cells = ((0.9, 0.256) * MAX_ROWS, (None, None) * MAX_ROWS)
    heatmap = Heatmap(table="steps", categories=("0", "1"), cells=cells)
    payload = payload_of([table_of(2 * MAX_ROWS)], [chart_of(curves=(), heatmap=heatmap)])
    assert payload["charts"][0]["heatmap"] == {
        "table": "steps",
        "categories": ("0", "1"),
        "cells": [[0.26] * MAX_ROWS, [None] * MAX_ROWS],
    }


def test_marks_stand_at_their_steps_and_times_under_their_label():
    skipped = [Mark(step=step, time_s=step / 3, label="skipped: x") for step in (7, 9)]
    payload = payload_of([], [], [*skipped, Mark(step=8, time_s=1.0, label="skipped: y")])
    assert payload["marks"] == [
        {"label": "skipped: x", "step": [7, 9], "time": [2.3, 3.0]},
        {"label": "skipped: y", "step": [8], "time": [1.0]},
    ]


def test_the_size_of_a_page_does_not_grow_with_the_steps_of_a_run():
    def size_bytes(num_rows):
        line = Curve(label="l", table="steps", values=(0.12345,) * num_rows, style=CurveStyle.RAW)
        return len(json.dumps(payload_of([table_of(num_rows)], [chart_of(curves=(line,))])))

    assert size_bytes(100 * MAX_ROWS) < 3 * size_bytes(MAX_ROWS)
