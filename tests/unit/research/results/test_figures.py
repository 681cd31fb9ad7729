"""What the figures show, asked of matplotlib before it draws them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from research.results.figures import COLORS, figures, save_figures
from research.results.summary import claim_records, summarize
from tests.fixtures.study import record, steps, study

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
OF_VCPO = [each for each in RECORDS if each.method == "vcpo"]


def numbers(records=RECORDS):
    summary = summarize(study(), records)
    return study(), summary, claim_records(study(), records, summary.tuned)


@functools.cache
def drawn():
    return figures(*numbers())


def panels(name):
    return drawn()[name].axes


def titles(axes):
    return [each.get_title() for each in axes]


def curves(axes, color):
    return [line.get_xydata().tolist() for line in axes.lines if line.get_color() == color]


def labels(ticks):
    return [each.get_text() for each in ticks]


def test_each_method_with_a_point_of_the_plane_has_a_heat_map():
    assert titles(panels("heat_maps.svg")) == ["VCPO", "plain"]
    assert titles(figures(*numbers(OF_VCPO))["heat_maps.svg"].axes) == ["VCPO"]


def test_a_heat_map_has_the_highest_rate_on_top_and_frames_what_reaches_the_target():
    of_vcpo, _ = panels("heat_maps.svg")
    assert labels(of_vcpo.get_yticklabels()) == ["0.0001", "0.001"]
    assert labels(of_vcpo.get_xticklabels()) == ["0", "32", "128"]
    assert of_vcpo.get_ylim() == (0.0, 2.0)
    shown = {each.get_position(): each.get_text() for each in of_vcpo.texts}
    # At lag 0 the cells of the tuning; at lag 32 seed 1.
    assert shown == {(0.5, 0.5): "0.80", (0.5, 1.5): "0.80", (1.5, 0.5): "0.90", (1.5, 1.5): "0.60"}
    frames = {tuple(map(int, each.get_xy())) for each in of_vcpo.patches}
    assert frames == {(0, 0), (0, 1), (1, 0)}
    (colors,) = of_vcpo.collections
    assert all(each.zorder > colors.zorder for each in of_vcpo.patches)


def test_the_synchronous_rate_is_bold():
    for axes in panels("heat_maps.svg"):
        weights = [each.get_fontweight() for each in axes.get_yticklabels()]
        assert weights == ["bold", "normal"]


def test_collapse_accuracy_and_safe_rates_have_a_point_for_each_lag():
    collapse, final, safe = panels("by_lag.svg")
    aside = -0.045
    assert curves(collapse, COLORS[0]) == [[[aside, 0.0], [1 + aside, 0.0]]]
    (places,) = curves(final, COLORS[0])
    assert [y for _, y in places] == pytest.approx([0.9, 0.9])
    # At lag 32 not all rates of the other method were run.
    assert [len(points) for color in COLORS[:2] for points in curves(safe, color)] == [2, 1]


def test_learning_curves_have_a_panel_for_each_lag_and_a_curve_for_each_method():
    fresh, stale = panels("accuracy.svg")
    assert titles([fresh, stale]) == ["k = 0", "k = 32"]
    assert curves(fresh, COLORS[0]) == [[[0.0, 0.2], [10.0, 0.9], [20.0, 0.9]]]
    assert curves(stale, COLORS[1]) == [[[0, 0.2], [10, 0.9], [20, 0.1], [30, 0.1], [40, 0.1]]]


def test_weights_have_two_quantiles_and_the_ess_of_each_method_at_each_lag_above_0():
    spread, size = panels("weights.svg")
    assert titles([spread, size]) == [
        "k = 32: 1 % and 99 % of log weights",
        "k = 32: ESS over trajectories",
    ]
    assert [len(curves(spread, color)) for color in COLORS[:2]] == [2, 2]
    # 40 of 128 trajectories at every step, in the middle of windows of 10.
    (shares,) = curves(size, COLORS[0])
    assert shares == [[at, 40 / 128] for at in (5.0, 15.0, 25.0, 35.0)]


def test_weights_that_count_for_nothing_do_not_stretch_the_axis():
    gone = record("vcpo", 32, [0.2, 0.1], seed=2)
    gone = replace(gone, steps=steps(10, log_weights=((-900.0,) * 7 + (3.0,),) * 10))
    spread, _ = figures(*numbers([*OF_VCPO, gone]))["weights.svg"].axes
    assert spread.get_ylim()[0] == -20.0


def test_the_legend_names_methods_that_have_claims():
    (both,) = drawn()["accuracy.svg"].legends
    (one,) = figures(*numbers(OF_VCPO))["accuracy.svg"].legends
    assert (labels(both.texts), labels(one.texts)) == (["VCPO", "plain"], ["VCPO"])


def test_equal_records_make_equal_files_even_without_a_cell(tmp_path):
    for records in (OF_VCPO, []):
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir(exist_ok=True)
            save_figures(*numbers(records), folder)
        written = {path.name: path.read_bytes() for path in first.iterdir()}
        assert len(written) == 4
        assert written == {path.name: path.read_bytes() for path in second.iterdir()}
