import math

import pytest

from vcpo.records.journal import Metrics
from vcpo.records.step_record import CHARTS
from vcpo.report.chart import SeriesStyle
from vcpo.report.figures import detail_charts, main_charts


@pytest.fixture
def metrics_of(make_step):
    return lambda *steps, evaluations=(): Metrics(
        steps=tuple(make_step(**fields) for fields in steps), evaluations=tuple(evaluations)
    )


def charts_by_name(run, metrics):
    return {chart.name: chart for chart in (*main_charts(run, metrics), *detail_charts(metrics))}


def values_of(chart, label):
    (series,) = [series for series in chart.series if series.label == label]
    return [(point.x, point.y) for point in series.points]


def test_the_four_main_curves_come_in_reading_order(run, metrics_of):
    assert [chart.name for chart in main_charts(run, metrics_of())] == [
        "reward",
        "ess",
        "step-size",
        "lag",
    ]


def test_the_reward_is_shown_with_its_evaluations(run, metrics_of, make_evaluation):
    metrics = metrics_of({"step": 1, "reward_mean": 0.2}, evaluations=[make_evaluation(0, 0.1)])
    chart = charts_by_name(run, metrics)["reward"]
    assert values_of(chart, "training") == [(1, 0.2)]
    assert values_of(chart, "held out") == [(0, 0.1)]


def test_the_ess_ratio_is_compared_with_the_on_policy_ratio(run, metrics_of):
    metrics = metrics_of(
        {"step": 1, "ess_ratio": 0.5, "on_policy_ess_ratio": 0.8},
        {"step": 2, "ess_ratio": 0.4, "on_policy_ess_ratio": 0.7},
    )
    chart = charts_by_name(run, metrics)["ess"]
    assert values_of(chart, "ESS ratio") == [(1, 0.5), (2, 0.4)]
    assert values_of(chart, "on-policy") == [(1, 0.8), (2, 0.7)]


def test_a_steady_reference_is_drawn_from_end_to_end(run, metrics_of):
    metrics = metrics_of(*({"step": step} for step in range(1, 10)))
    assert values_of(charts_by_name(run, metrics)["lag"], "bound 8") == [(1, 8), (9, 8)]


def test_the_step_size_stands_on_the_whole_scale(run, metrics_of):
    chart = charts_by_name(run, metrics_of({"step": 1, "learning_rate_scale": 0.9}))["step-size"]
    assert (chart.y_low, chart.y_high) == (0.0, 1.0)
    assert "0.0003" in chart.unit


def test_the_lag_shows_mean_median_and_maximum(run, metrics_of):
    chart = charts_by_name(run, metrics_of({"lag_mean": 1.5, "lag_p50": 1, "lag_max": 4}))["lag"]
    shown = {label: values_of(chart, label) for label in ("mean", "p50", "max")}
    assert shown == {"mean": [(1, 1.5)], "p50": [(1, 1)], "max": [(1, 4)]}


def test_a_step_without_a_number_is_a_gap_and_a_mark(run, metrics_of):
    skipped = {"step": 3, "ess_ratio": math.nan, "skipped": "loss is not finite"}
    chart = charts_by_name(run, metrics_of({"step": 2, "ess_ratio": 0.5}, skipped))["ess"]
    assert values_of(chart, "ESS ratio") == [(2, 0.5), (3, None)]
    assert [mark.label for mark in chart.horizon.marks] == ["step 3 skipped: loss is not finite"]


def test_a_long_noisy_curve_gets_a_trend_in_front(run, metrics_of):
    metrics = metrics_of(*({"step": step, "reward_mean": step % 2} for step in range(1, 41)))
    raw, trend, _ = charts_by_name(run, metrics)["reward"].series
    assert (raw.style, trend.style) == (SeriesStyle.RAW, SeriesStyle.LINE)
    assert trend.points[20].y == pytest.approx(3 / 5)  # three of the steps 19 to 23 are odd


def test_all_charts_share_one_horizon(run, metrics_of, make_evaluation):
    metrics = metrics_of({"step": 1}, {"step": 9}, evaluations=[make_evaluation(0, 0.1)])
    horizons = {chart.horizon for chart in charts_by_name(run, metrics).values()}
    assert [(horizon.first_step, horizon.last_step) for horizon in horizons] == [(0, 9)]


def test_every_curve_that_the_step_record_declares_is_drawn(run, metrics_of):
    numbers = {field: number for number, (field, _) in enumerate(CHARTS, start=1)}
    charts = charts_by_name(run, metrics_of({"step": 1, **numbers}))
    shown = {field: values_of(charts[field], curve.label) for field, curve in CHARTS}
    assert shown == {field: [(1, number)] for field, number in numbers.items()}
