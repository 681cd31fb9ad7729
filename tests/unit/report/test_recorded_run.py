import pytest

from vcpo.records.journal import Metrics
from vcpo.report.numbers import compact, decimal, duration, finite
from vcpo.report.recorded_run import RunClock, event_rows


@pytest.fixture
def rows_of(make_event):
    """Kind and messages of each row, from kinds in order; messages are their numbers."""

    def rows_of(*kinds):
        events = [make_event(f"{at}", float(at), kind=kind) for at, kind in enumerate(kinds)]
        return [
            (row.last.kind, "".join(event.message for event in row.events))
            for row in event_rows(events)
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
        (0.1, "0.1"),
        (0.12345678, "0.1235"),
        (-2.5, "-2.5"),
        (999.96, "1000"),
        (10000.0, "10,000"),
        (0.0003, "0.0003"),
        (2.5e-06, "2.5e-06"),
        (2.5e9, "2.5e+09"),
    ],
)
def test_numbers_on_an_axis_are_short(value, words):
    assert compact(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (192.0, "3m 12s"),
        (7500.0, "2h 05m"),
        (-3.0, "0s"),
    ],
)
def test_durations_name_their_two_largest_units(seconds, words):
    assert duration(seconds) == words
