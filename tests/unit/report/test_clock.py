import pytest

from vcpo.records.journal import Metrics
from vcpo.report.recorded_run import RunClock

EMPTY = Metrics(steps=(), evaluations=())


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


def test_the_total_is_the_sum_of_the_sessions(resumed):
    assert (resumed.num_sessions, resumed.total_s) == (2, 70.0)


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


def test_a_run_without_records_has_no_time():
    clock = RunClock(EMPTY, ())
    assert (clock.num_sessions, clock.total_s, clock.elapsed_s(5.0)) == (0, None, 0.0)
