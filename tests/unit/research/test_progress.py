"""Progress lines of a study."""

from __future__ import annotations

from research.cells.pool import Outcome
from research.progress import StudyProgress
from tests.fixtures.learner.dispatcher import ManualClock
from tests.fixtures.study import cell


def test_the_rest_takes_as_long_for_each_cell_as_it_took_so_far():
    clock = ManualClock()
    progress = StudyProgress("grid", total=10, kept=4, jobs=2, clock=clock)
    assert progress.opening_line() == "grid: 10 cells, 4 of them finished before, 2 at a time"
    clock.advance(30)
    line = progress.outcome_line(Outcome(cell=cell(), error=None))
    assert line == "grid: 5/10 cells, 5 left, about 2m 30s  vcpo-k32-lr0.0001-s1"


def test_when_time_is_up_the_cells_that_are_left_are_counted():
    progress = StudyProgress("grid", total=10, kept=4, jobs=2, clock=ManualClock())
    progress.outcome_line(Outcome(cell=cell(), error=None))
    assert progress.num_left == 5
    assert progress.closing_line() == "grid: time is up, 5 cells left; the same command continues"


def test_a_failed_cell_is_reported_with_its_error():
    progress = StudyProgress("grid", total=2, kept=0, jobs=1, clock=ManualClock())
    lines = progress.outcome_line(Outcome(cell=cell(), error="Oops\n")).splitlines()
    assert "1 failed" in lines[0]
    assert lines[0].endswith("vcpo-k32-lr0.0001-s1 FAILED")
    assert lines[1] == "Oops"
