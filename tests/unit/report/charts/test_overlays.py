import pytest

from vcpo.records.journal import Metrics
from vcpo.records.step_record import CHARTS
from vcpo.report.charts.chart import CATEGORIES
from vcpo.report.charts.overlays import detail_overlays, inks_of, main_overlays, overlay_tables
from vcpo.report.recorded_run import RecordedRun


@pytest.fixture
def recorded(run, make_step, make_evaluation):
    """Make a run with a number of steps, each a second long."""
    return lambda name, num_steps, **fields: RecordedRun(
        name=name,
        run=run,
        metrics=Metrics(
            steps=tuple(
                make_step(step, time_unix_s=1000.0 + step, **fields)
                for step in range(1, num_steps + 1)
            ),
            evaluations=(make_evaluation(1, 0.5, time_unix_s=1001.0),),
        ),
    )


def test_runs_of_different_lengths_have_rows_of_their_own(recorded):
    tables = overlay_tables([recorded("a", 2), recorded("b", 3)])
    rows = {table.name: (table.run, table.steps, table.times_s) for table in tables}
    assert rows["0-steps"] == ("a", (1, 2), (0.0, 1.0))
    assert rows["1-steps"] == ("b", (1, 2, 3), (0.0, 1.0, 2.0))
    assert rows["1-evaluations"] == ("b", (1,), (0.0,))


def test_every_chart_has_a_curve_of_every_run_in_its_color(recorded):
    runs = [recorded("a", 2), recorded("b", 3)]
    for chart in (*main_overlays(runs), *detail_overlays(runs)):
        assert [(curve.label, curve.ink) for curve in chart.curves] == [
            ("a", CATEGORIES[0]),
            ("b", CATEGORIES[1]),
        ]


def test_the_ess_is_relative_to_what_is_possible_on_policy(recorded):
    runs = [recorded("a", 2, ess_ratio=0.3, on_policy_ess_ratio=0.6)]
    (chart,) = [chart for chart in main_overlays(runs) if chart.name == "relative-ess"]
    assert chart.curves[0].values == pytest.approx((0.5, 0.5))


def test_there_is_a_small_chart_for_each_number_that_declares_one(recorded):
    assert len(detail_overlays([recorded("a", 1), recorded("b", 1)])) == len(CHARTS)


def test_a_ninth_run_has_the_first_color_again(recorded):
    runs = [recorded(str(number), 1) for number in range(9)]
    assert inks_of(runs)[8] is inks_of(runs)[0]
    assert len(set(inks_of(runs))) == 8
