"""The cells of a study, and when two are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.study import cell, study
from vcpo_study.cells.cell import Selection, grid_cells, tuning_cells

ALL = Selection()
RATES = {"vcpo": 1e-4, "plain": 1e-3}


def test_the_grid_has_every_method_lag_and_seed_once():
    cells = grid_cells(study(), ALL, RATES)
    places = [(each.method, each.lag, each.seed) for each in cells]
    assert len(places) == len(set(places)) == 2 * 3 * 2


def test_a_seed_is_finished_before_the_next_begins():
    assert [each.seed for each in grid_cells(study(), ALL, RATES)] == [1] * 6 + [2] * 6


def test_each_method_has_its_own_learning_rate():
    cells = grid_cells(study(), ALL, RATES)
    assert {(each.method, each.spec.optimizer.learning_rate) for each in cells} == set(
        RATES.items()
    )


def test_a_method_without_a_rate_is_left_out():
    assert {each.method for each in grid_cells(study(), ALL, {"vcpo": 1e-4})} == {"vcpo"}


def test_a_selection_takes_some_methods_and_lags():
    selection = Selection(methods=frozenset({"plain"}), lags=frozenset({0, 128}))
    cells = grid_cells(study(), selection, RATES)
    assert {(each.method, each.lag) for each in cells} == {("plain", 0), ("plain", 128)}


def test_every_method_is_tuned_over_the_same_rates_at_one_lag():
    cells = tuning_cells(study(), ALL)
    assert [(each.method, each.learning_rate, each.lag, each.seed) for each in cells] == [
        ("vcpo", 1e-4, 32, 101),
        ("plain", 1e-4, 32, 101),
        ("vcpo", 1e-3, 32, 101),
        ("plain", 1e-3, 32, 101),
    ]


def test_a_name_says_where_the_cell_stands():
    assert cell("plain", lag=32, seed=2, rate=1e-3).name == "plain-k32-lr0.001-s2"


def test_the_held_out_prompts_are_those_of_the_run_in_every_cell():
    assert {each.evaluation_seed for each in grid_cells(study(), ALL, RATES)} == {0}


@pytest.mark.parametrize(
    "other",
    [cell(lag=32), cell(seed=2), cell(rate=2e-4), cell("plain")],
    ids=lambda each: each.name,
)
def test_other_settings_have_another_digest(other):
    assert other.digest != cell().digest


def test_what_is_about_processes_leaves_the_digest_alone():
    spec = cell().spec
    more_attempts = spec.lease.model_copy(update={"max_attempts": 7})
    changed = spec.model_copy(update={"lease": more_attempts})
    assert replace(cell(), spec=changed).digest == cell().digest


def test_a_setting_that_is_new_leaves_cells_valid_that_have_its_default():
    spec = cell().spec
    told = spec.algorithm.model_validate(
        {**spec.algorithm.model_dump(by_alias=True, exclude_unset=True), "gradientNorms": "exact"}
    )
    changed = spec.model_copy(update={"algorithm": told})
    assert "gradient_norms" not in spec.algorithm.model_fields_set
    assert replace(cell(), spec=changed).digest == cell().digest
