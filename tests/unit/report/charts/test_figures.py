import math
from dataclasses import replace

import pytest

from vcpo.api import VCPORunSpec
from vcpo.records.journal import Metrics
from vcpo.report.charts.chart import CurveStyle
from vcpo.report.charts.figures import main_charts, marks_of, sections, tables_of
from vcpo.report.charts.step_chart import CHARTS
from vcpo.report.recorded_run import RecordedRun


@pytest.fixture
def recorded(run, make_step):
    """Make a recorded run from the fields of its steps."""
    return lambda *steps, evaluations=(): RecordedRun(
        run=run,
        metrics=Metrics(
            steps=tuple(make_step(**fields) for fields in steps), evaluations=tuple(evaluations)
        ),
    )


def charts_of(recorded_run):
    details = [chart for section in sections(recorded_run) for chart in section.charts]
    return {chart.name: chart for chart in (*main_charts(recorded_run), *details)}


def values_of(chart, label):
    (curve,) = [curve for curve in chart.curves if curve.label == label]
    return curve.values


def test_the_main_curves_come_in_reading_order(recorded):
    assert [chart.name for chart in main_charts(recorded())] == [
        "reward",
        "warning",
        "ess",
        "step-size",
        "lag",
        "ess-by-lag",
    ]


def test_no_two_charts_share_a_name(recorded):
    found = recorded()
    details = [chart for section in sections(found) for chart in section.charts]
    assert len(charts_of(found)) == len(main_charts(found)) + len(details)


def test_the_reward_is_shown_with_its_evaluations(recorded, make_evaluation):
    found = recorded({"step": 1, "reward_mean": 0.2}, evaluations=[make_evaluation(0, 0.1)])
    chart = charts_of(found)["reward"]
    assert (values_of(chart, "training"), values_of(chart, "held out")) == ((0.2,), (0.1,))
    assert [(table.name, table.steps) for table in tables_of(found)] == [
        ("steps", (1,)),
        ("evaluations", (0,)),
    ]


def test_the_early_warning_stands_in_its_bands(recorded):
    chart = charts_of(recorded({"step": 1, "warning_score": 0.7}))["warning"]
    assert values_of(chart, "score") == (0.7,)
    assert [(band.level, band.low, band.high) for band in chart.bands] == [
        ("warn", pytest.approx(1 / 3), pytest.approx(2 / 3)),
        ("critical", pytest.approx(2 / 3), 1.0),
    ]


def test_the_ess_ratio_is_compared_with_the_on_policy_ratio(recorded):
    chart = charts_of(recorded({"step": 1, "ess_ratio": 0.5, "on_policy_ess_ratio": 0.8}))["ess"]
    assert (values_of(chart, "ESS ratio"), values_of(chart, "on-policy")) == ((0.5,), (0.8,))


def test_the_step_size_stands_on_the_whole_scale(recorded):
    chart = charts_of(recorded({"step": 1, "learning_rate_scale": 0.9}))["step-size"]
    assert (chart.low, chart.high) == (0.0, 1.0)
    assert chart.caption.endswith("The base rate is 0.0003.")


def test_the_course_of_the_base_rate_is_told(recorded):
    found = recorded({"step": 1})
    optimizer = {"learningRate": 0.001, "warmupSteps": 9, "schedule": "cosine"}
    document = {**found.run.spec.model_dump(by_alias=True), "steps": 10, "optimizer": optimizer}
    spec = VCPORunSpec.model_validate(document)
    run = found.run.model_copy(update={"spec": spec})
    chart = charts_of(replace(found, run=run))["step-size"]
    told = "The base rate is 0.001 after 9 updates, then falls to 0.0001 (cosine)."
    assert chart.caption.endswith(told)


def test_the_lag_shows_mean_median_maximum_and_both_limits(recorded):
    step = {"lag_mean": 1.5, "lag_p50": 1, "lag_max": 4, "lag_limit_steps": 6}
    chart = charts_of(recorded(step))["lag"]
    shown = {curve.label: curve.values for curve in chart.curves}
    assert shown == {
        "mean": (1.5,),
        "p50": (1,),
        "max": (4,),
        "lag limit": (6,),
        "most 8": (8,),
    }


def test_the_ess_of_each_age_is_a_row_of_cells(recorded):
    found = recorded(
        {"step": 1, "ess_by_lag": {"0": 0.9}}, {"step": 2, "ess_by_lag": {"2": 0.5, "128": 0.1}}
    )
    heatmap = charts_of(found)["ess-by-lag"].heatmap
    assert heatmap.categories == ("0", "2-3", "128+")
    assert heatmap.cells == ((0.9, None), (None, 0.5), (None, 0.1))


SKIPPED = {
    "step": 2,
    "skipped": "no_gradient",
    "learning_rate_scale": 0.0,
    "gradient_norm": 0.0,
    "baseline_shift": 0.0,
    "importance_weight_max": 0.0,
    "ess_ratio": 0.0,
}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("step-size", "effective"),
        ("gradient-norm", "norm"),
        ("baseline-shift", "shift"),
        ("importance-weight-max", "weight"),
        ("ess", "ESS ratio"),
    ],
)
def test_a_skipped_step_is_a_gap_and_no_zero(recorded, name, label):
    values = values_of(charts_of(recorded({"step": 1}, SKIPPED))[name], label)
    assert values[0] > -1
    assert values[1] is None


def test_a_skipped_step_does_not_pull_the_smoothed_curve(recorded):
    steps = [{"step": step, "learning_rate_scale": 0.9} for step in range(1, 41)]
    steps[20] = {**SKIPPED, "step": 21}
    trend = charts_of(recorded(*steps))["step-size"].curves[1].values
    assert [value for value in trend if value is not None] == pytest.approx([0.9] * 39)
    assert trend[20] is None


def test_a_skipped_step_is_marked(recorded):
    (mark,) = marks_of(recorded({"step": 1}, SKIPPED))
    assert (mark.step, mark.label) == (2, "skipped: no_gradient")


def test_a_step_without_a_number_is_a_gap(recorded):
    found = recorded({"step": 2, "ess_ratio": 0.5}, {"step": 3, "ess_ratio": math.nan})
    assert values_of(charts_of(found)["ess"], "ESS ratio") == (0.5, None)


def test_a_long_noisy_curve_gets_a_trend_in_front(recorded):
    found = recorded(*({"step": step, "reward_mean": step % 2} for step in range(1, 41)))
    raw, trend, _ = charts_of(found)["reward"].curves
    assert (raw.style, trend.style) == (CurveStyle.RAW, CurveStyle.LINE)
    assert trend.values[20] == pytest.approx(3 / 5)  # three of the steps 19 to 23 are odd


def test_every_reason_to_drop_has_a_curve_of_its_own(recorded):
    found = recorded({"step": 1, "dropped": {"lag": 2}}, {"step": 2, "dropped": {"lag": 2, "x": 1}})
    curves = charts_of(found)["drops"].curves
    assert [(curve.label, curve.values) for curve in curves] == [("lag", (2, 2)), ("x", (0, 1))]
    assert len({curve.ink for curve in curves}) == 2


def test_every_part_of_the_reward_has_a_curve_and_a_step_without_it_a_gap(recorded):
    found = recorded(
        {"step": 1, "reward_parts": {"exact": 0.25, "form": 0.1}},
        {"step": 2, "reward_parts": {"exact": 0.5}},
    )
    curves = charts_of(found)["reward-parts"].curves
    assert [(curve.label, curve.values) for curve in curves] == [
        ("exact", (0.25, 0.5)),
        ("form", (0.1, None)),
    ]


def test_all_of_sixteen_parts_are_drawn(recorded):
    parts = {f"part {number}": float(number) for number in range(16)}
    curves = charts_of(recorded({"step": 1, "reward_parts": parts}))["reward-parts"].curves
    assert {curve.label: curve.values for curve in curves} == {
        name: (number,) for name, number in parts.items()
    }


def test_the_length_of_responses_is_shown_from_the_short_to_the_long_ones(recorded):
    lengths = {"p05": 3, "p50": 40, "p95": 512}
    step = {f"response_tokens_{name}": tokens for name, tokens in lengths.items()}
    chart = charts_of(recorded({"step": 1, "response_tokens_mean": 90.5, **step}))[
        "response-length"
    ]
    shown = {curve.label: curve.values for curve in chart.curves}
    assert shown == {"p5": (3,), "median": (40,), "p95": (512,), "mean": (90.5,)}


def test_the_time_of_a_step_is_shown_with_its_stages(recorded):
    stages = {"score": 2.0, "backward": 5.0, "optimizer": 1.0}
    chart = charts_of(recorded({"step": 1, "idle_s": 3.0, "step_s": 9.0, "stage_s": stages}))[
        "seconds"
    ]
    shown = {curve.label: curve.values for curve in chart.curves}
    assert shown == {"waiting": (3.0,), "computing": (9.0,)} | {
        name: (seconds,) for name, seconds in stages.items()
    }
    assert len({curve.ink for curve in chart.curves}) == 5


def test_throughput_is_shared_among_the_workers(recorded):
    found = recorded(
        {"step": 1, "tokens_per_s": 90.0, "workers": 3},
        {"step": 2, "tokens_per_s": 0, "workers": 0},
    )
    assert values_of(charts_of(found)["throughput-per-worker"], "tokens/s") == (30.0, None)


def test_every_curve_that_the_step_record_declares_is_drawn(recorded):
    numbers = {(field, chart.entry): at for at, (field, chart) in enumerate(CHARTS, start=1)}
    plain = {field: number for (field, entry), number in numbers.items() if entry is None}
    entries = {entry: number for (_, entry), number in numbers.items() if entry is not None}
    charts = charts_of(recorded({"step": 1, **plain, "diagnostics": entries}))
    names = {
        (field, chart.entry): (chart.entry or field).replace("_", "-") for field, chart in CHARTS
    }
    shown = {
        (field, chart.entry): values_of(charts[names[field, chart.entry]], chart.label)
        for field, chart in CHARTS
    }
    assert shown == {key: (number,) for key, number in numbers.items()}
