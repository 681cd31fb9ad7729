"""Cells in separate processes."""

import functools
import multiprocessing

from research.cells.pool import run_cells
from tests.fixtures.study import cell
from tests.unit.research import work


def errors(outcomes):
    return {outcome.cell.seed: outcome.error for outcome in outcomes}


def test_every_cell_is_run(tmp_path):
    cells = [cell(seed=seed, lag=lag) for seed in (1, 2) for lag in (32, 128)]
    outcomes = list(run_cells(cells, functools.partial(work.leave_a_file, tmp_path), jobs=3))
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert {path.name for path in tmp_path.iterdir()} == {each.name for each in cells}


def test_an_error_is_reported_and_the_others_go_on(tmp_path):
    task = functools.partial(work.fail_for_seed_1, tmp_path)
    found = errors(run_cells([cell(seed=1), cell(seed=2)], task, jobs=1))
    assert found[1] is not None
    assert found[1].endswith("ValueError: no luck with seed 1\n")
    assert found[2] is None


def test_a_process_that_is_killed_is_reported_by_its_status():
    assert errors(run_cells([cell()], work.die, jobs=1)) == {1: "the process ended with status -9"}


def test_who_stops_listening_stops_the_cells_under_way(tmp_path):
    task = functools.partial(work.leave_a_file_and_stay, tmp_path)
    outcomes = run_cells([cell(seed=2), cell(seed=1)], task, jobs=2)
    assert next(outcomes).cell.seed == 1
    outcomes.close()
    assert multiprocessing.active_children() == []
