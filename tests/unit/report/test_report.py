"""What the charts of a report show, as the page's script reads it."""

import json
import math

import pytest

from vcpo.records.journal import Metrics
from vcpo.report.charts import MAX_ROWS, page_data
from vcpo.report.numbers import compact, decimal, duration, finite
from vcpo.report.recorded_run import RecordedRun, RunClock, event_rows


@pytest.fixture
def rows_of(make_event):
    """Kind and messages of each row, from kinds in order; messages are their numbers."""

    def rows_of(*kinds):
        events = [make_event(f"{at}", float(at), kind=kind) for at, kind in enumerate(kinds)]
        return [
            (row[-1].kind, "".join(event.message for event in row)) for row in event_rows(events)
        ]

    return rows_of


def test_three_of_a_kind_in_a_row_are_one_row(rows_of):
    assert rows_of("A", "B", "B", "B", "A") == [("A", "0"), ("B", "123"), ("A", "4")]


def test_skipped_steps_are_one_row_at_the_last_of_them_whatever_lies_between(rows_of):
    assert rows_of("StepSkipped", "A", "StepSkipped", "StepSkipped", "B") == [
        ("A", "1"),
        ("StepSkipped", "023"),
        ("B", "4"),
    ]


@pytest.fixture
def resumed(make_step, make_event):
    """A clock of two sessions: from 1000 to 1030, and from 5000 to 5040."""
    events = [
        make_event("", 1000.0, kind="Started"),
        make_event("", 1030.0, kind="Draining"),
        make_event("", 5000.0, kind="Started"),
    ]
    steps = (make_step(1, time_unix_s=1020.0), make_step(2, time_unix_s=5040.0))
    return RunClock(Metrics(steps=steps, evaluations=()), events)


@pytest.mark.parametrize(
    ("time_unix_s", "elapsed_s"),
    [(900.0, 0.0), (1000.0, 0.0), (1020.0, 20.0), (5000.0, 30.0), (5040.0, 70.0)],
)
def test_the_clock_stands_still_between_sessions(resumed, time_unix_s, elapsed_s):
    assert resumed.elapsed_s(time_unix_s) == elapsed_s


def test_without_a_start_the_clock_begins_with_the_first_record(make_step, make_evaluation):
    metrics = Metrics(
        steps=(make_step(1, time_unix_s=130.0),),
        evaluations=(make_evaluation(0, 0.5, time_unix_s=100.0),),
    )
    clock = RunClock(metrics, ())
    assert (clock.num_sessions, clock.total_s, clock.elapsed_s(130.0)) == (1, 30.0, 30.0)


def test_a_record_before_the_first_start_belongs_to_a_session_of_its_own(make_step, make_event):
    metrics = Metrics(steps=(make_step(1, time_unix_s=90.0),), evaluations=())
    clock = RunClock(metrics, [make_event("", 100.0, kind="Started"), make_event("", 110.0)])
    assert clock.total_s == 10.0


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_unknown(value):
    assert finite(value) is None
    assert decimal(value, ".2f") == "-"
    assert duration(value) == "-"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.12345678, "0.1235"),
        (999.96, "1000"),
        (10000.0, "10,000"),
        (2.5e-06, "2.5e-06"),
        (2.5e9, "2.5e+09"),
    ],
)
def test_numbers_on_an_axis_are_short(value, words):
    assert compact(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (192.0, "3m 12s"),
        (7500.0, "2h 05m"),
        (-3.0, "0s"),
    ],
)
def test_durations_name_their_two_largest_units(seconds, words):
    assert duration(seconds) == words


@pytest.fixture
def recorded(run, make_step):
    """Make a recorded run from the fields of its steps."""
    return lambda *steps, evaluations=(): RecordedRun(
        run=run,
        metrics=Metrics(
            steps=tuple(make_step(**fields) for fields in steps), evaluations=tuple(evaluations)
        ),
    )


def chart_of(recorded_run, name):
    (chart,) = (each for each in page_data(recorded_run)["charts"] if each["name"] == name)
    return chart


def curves_of(recorded_run, name):
    return {curve["label"]: curve["low"] for curve in chart_of(recorded_run, name)["curves"]}


def test_the_reward_is_shown_with_its_evaluations(recorded, make_evaluation):
    found = recorded({"step": 1, "reward_mean": 0.2}, evaluations=[make_evaluation(0, 0.1)])
    curves = [(one["label"], *one["low"]) for one in chart_of(found, "reward")["curves"]]
    ends = [("held out", 0.1), ("chance", 0.048028), ("chance", 0.15197)]
    assert curves == [("training", 0.2), *ends]
    tables = page_data(found)["tables"]
    assert {name: table["step"] for name, table in tables.items()} == {
        "steps": [1],
        "evaluations": [0],
    }


def test_the_lag_shows_mean_median_maximum_and_both_limits(recorded):
    step = {"lag_mean": 1.5, "lag_p50": 1, "lag_max": 4, "lag_limit_steps": 6}
    assert curves_of(recorded(step), "lag") == {
        "mean": [1.5],
        "p50": [1],
        "max": [4],
        "lag limit": [6],
        "most 8": [8],
    }


def test_the_ess_of_each_age_is_a_row_of_cells(recorded):
    found = recorded(
        {"step": 1, "ess_by_lag": {"0": 0.9}}, {"step": 2, "ess_by_lag": {"2": 0.5, "128": 0.1}}
    )
    heatmap = chart_of(found, "ess-by-lag")["heatmap"]
    assert heatmap["categories"] == ["0", "2+", "128+"]
    assert heatmap["cells"] == [[0.9, None], [None, 0.5], [None, 0.1]]


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
        ("ess", "ESS ratio"),
    ],
)
def test_a_skipped_step_is_a_gap_and_no_zero(recorded, name, label):
    before, skipped = curves_of(recorded({"step": 1}, SKIPPED), name)[label]
    assert before > -1
    assert skipped is None


def test_a_skipped_step_does_not_pull_the_smoothed_curve(recorded):
    steps = [{"step": step, "learning_rate_scale": 0.9} for step in range(1, 41)]
    steps[20] = {**SKIPPED, "step": 21}
    trend = curves_of(recorded(*steps), "step-size")["mean of 5"]
    assert [value for value in trend if value is not None] == pytest.approx([0.9] * 39)
    assert trend[20] is None


def test_a_long_noisy_curve_gets_a_trend_in_front(recorded):
    found = recorded(*({"step": step, "reward_mean": step % 2} for step in range(1, 41)))
    raw, trend, *_ = chart_of(found, "reward")["curves"]
    assert (raw["style"], trend["style"]) == ("raw", "line")
    assert trend["low"][20] == pytest.approx(3 / 5)  # three of the steps 19 to 23 are odd


def test_every_entry_has_a_curve_of_its_own(recorded):
    found = recorded({"step": 1, "dropped": {"lag": 2}}, {"step": 2, "dropped": {"lag": 2, "x": 1}})
    assert curves_of(found, "drops") == {"lag": [2, 2], "x": [0, 1]}
    found = recorded(
        {"step": 1, "reward_parts": {"exact": 0.25, "form": 0.1}},
        {"step": 2, "reward_parts": {"exact": 0.5}},
    )
    assert curves_of(found, "reward-parts") == {"exact": [0.25, 0.5], "form": [0.1, None]}


def test_a_long_run_is_thinned_and_keeps_its_least_and_largest_values(recorded):
    rewards = [0.5] * (2 * MAX_ROWS)
    rewards[7], rewards[8] = -1.0, 2.0
    found = recorded(*({"step": at, "reward_mean": one} for at, one in enumerate(rewards, 1)))
    raw, trend, *_ = chart_of(found, "reward")["curves"]
    assert [len(column) for column in (raw["low"], raw["high"], trend["low"])] == [MAX_ROWS] * 3
    assert (raw["low"][3], raw["high"][3]) == (-1.0, 0.5)
    assert (raw["low"][4], raw["high"][4]) == (0.5, 2.0)


def test_a_number_that_cannot_be_drawn_is_a_gap_and_the_page_stays_plain_json(recorded):
    found = recorded(
        {"step": 1, "gradient_norm": 1 / 3},
        {"step": 2, "gradient_norm": math.inf},
        {"step": 3, "gradient_norm": 1e301},
        {"step": 4, "diagnostics": {"kl_per_token": 0.0}},
    )
    assert curves_of(found, "gradient-norm")["norm"] == [0.33333, None, None, 1.5]
    assert curves_of(found, "kl-per-token")["KL"][3] is None  # no logarithm
    json.dumps(page_data(found), allow_nan=False)
