"""The cells of a study, and when a record is one of a cell."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import pytest

from research.cells.cell import (
    Part,
    Selection,
    claims_cells,
    plane_cells,
    tuning_cells,
)
from research.study import Ages
from tests.fixtures.study import STUDY, cell, study, study_document, with_more_seeds
from vcpo.algo.methods import LOSS_CONFIGS, Method

RATES = {"vcpo": 1e-4, "plain": 1e-3}


def places(cells):
    return [(each.method, each.lag, each.learning_rate, each.seed) for each in cells]


def test_the_plane_has_every_method_rate_lag_and_seed_once():
    found = places(plane_cells(study()))
    # Two methods and two rates: at lag 0 on one seed of the tuning, at two more lags on two.
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2 * 2)


def test_at_lag_0_the_cells_of_the_plane_are_those_of_the_tuning():
    synchronous = [each for each in plane_cells(study()) if each.lag == 0]
    assert synchronous == tuning_cells(study())


@pytest.mark.parametrize(
    ("cells", "seeds"),
    [(plane_cells(study()), [101, 1, 2]), (claims_cells(study(), RATES), [1, 2, 3])],
    ids=["plane", "claims"],
)
def test_a_seed_is_finished_before_the_next_begins(cells, seeds):
    assert [seed for seed, _ in groupby(cells, key=lambda each: each.seed)] == seeds


def test_every_method_is_tuned_over_all_rates_at_lag_0_with_seeds_of_its_own():
    assert places(tuning_cells(study())) == [
        ("vcpo", 0, 1e-4, 101),
        ("plain", 0, 1e-4, 101),
        ("vcpo", 0, 1e-3, 101),
        ("plain", 0, 1e-3, 101),
    ]


def test_a_claim_is_made_at_each_methods_own_rate():
    found = claims_cells(study(), RATES)
    assert {(each.method, each.spec.optimizer.learning_rate) for each in found} == set(
        RATES.items()
    )
    assert {(each.lag, each.seed) for each in found} == {
        (lag, seed) for lag in (0, 32) for seed in (1, 2, 3)
    }


def test_a_method_without_a_synchronous_rate_is_left_out():
    assert {each.method for each in claims_cells(study(), {"vcpo": 1e-4})} == {"vcpo"}


def test_claims_may_be_made_for_some_methods():
    some = STUDY.replace("seeds: [1, 2, 3]}", "seeds: [1, 2, 3], methods: [vcpo]}")
    cells = claims_cells(study_document(some).spec, RATES)
    assert {each.method for each in cells} == {"vcpo"}


def test_more_seeds_are_of_their_lags_and_methods_only():
    given = "lags: [32], methods: [plain], seeds: [7]"
    plane = plane_cells(study_document(with_more_seeds("plane", given)).spec)
    claims = claims_cells(study_document(with_more_seeds("claims", given)).spec, RATES)
    for cells, without in ((plane, plane_cells(study())), (claims, claims_cells(study(), RATES))):
        assert {(each.method, each.lag) for each in cells if each.seed == 7} == {("plain", 32)}
        assert [each for each in cells if each.seed != 7] == without


def test_a_seed_that_is_given_again_makes_no_second_cell():
    again = with_more_seeds("plane", "seeds: [2, 7]}, {lags: [32], seeds: [7]")
    found = places(plane_cells(study_document(again).spec))
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2 * 3)


def test_a_cell_of_plane_and_claims_is_one_cell():
    plane = {each.name: each for each in plane_cells(study())}
    claims = {each.name: each for each in claims_cells(study(), RATES)}
    shared = plane.keys() & claims.keys()
    assert len(shared) == 2 * 2  # methods, seeds 1 and 2 at lag 32
    assert all(plane[name] == claims[name] for name in shared)


def test_a_selection_takes_some_methods_and_lags():
    some = Selection(methods=frozenset({"plain"}), lags=frozenset({32, 128}))
    found = {(each.method, each.lag) for each in plane_cells(study(), some)}
    assert found == {("plain", 32), ("plain", 128)}
    assert {each.lag for each in claims_cells(study(), RATES, some)} == {32}


def test_the_selected_lags_leave_the_tuning_whole():
    assert len(tuning_cells(study(), Selection(lags=frozenset({128})))) == 4


def test_a_selection_takes_some_parts():
    only = Selection(parts=frozenset({Part.CLAIMS}))
    assert tuning_cells(study(), only) == plane_cells(study(), only) == []
    assert len(claims_cells(study(), RATES, only)) == 2 * 2 * 3


def test_a_name_says_where_the_cell_stands():
    assert cell("plain", lag=32, seed=2, rate=1e-3).name == "plain-k32-lr0.001-s2"


def test_the_held_out_prompts_are_those_of_the_run_in_every_cell():
    assert {each.evaluation_seed for each in plane_cells(study())} == {0}


@pytest.mark.parametrize(
    "other",
    [cell(lag=128), cell(seed=2), cell(rate=1e-3), cell("plain")],
    ids=lambda each: each.name,
)
def test_a_record_with_other_settings_is_of_another_cell(other):
    assert not cell().has_settings(other.settings)
    assert cell().has_settings(cell().settings)


def test_what_is_about_processes_changes_no_setting():
    spec = cell().spec
    more_attempts = spec.lease.model_copy(update={"max_attempts": 7})
    changed = spec.model_copy(update={"lease": more_attempts})
    assert replace(cell(), spec=changed).settings == cell().settings


def test_a_record_older_than_a_setting_is_of_the_cell_that_has_its_default():
    older = {name: value for name, value in cell().settings.items() if name != "algorithm.deadBand"}
    assert cell().has_settings(older)
    assert not cell_with_dead_band(0.5).has_settings(older)


def test_a_record_made_with_another_default_is_of_another_cell():
    then = {**cell().settings, "optimizer.beta2": 0.999}
    assert not cell().has_settings(then)


def test_a_field_of_a_record_that_is_gone_since_is_not_compared():
    assert cell().has_settings({**cell().settings, "algorithm.gone": 1})


def test_a_held_rate_is_a_setting_of_its_own():
    held = replace(cell(), hold_rate_at_step=48)
    assert held.has_settings(held.settings)
    assert not held.has_settings(cell().settings)
    assert not cell().has_settings(held.settings)


def test_ages_are_a_setting_of_their_own():
    mixed = replace(cell(), ages=Ages(shares=(0.0, 1.0)))
    assert mixed.settings["ages"]["shares"] == [0.0, 1.0]
    assert mixed.has_settings(mixed.settings)
    assert not mixed.has_settings(cell().settings)
    assert not cell().has_settings(mixed.settings)


@pytest.mark.parametrize(
    ("group", "setting"),
    [
        ({"precision": "bfloat16"}, {"precision": "bfloat16"}),
        ({"quantization": "int8"}, {"quantization": "int8"}),
        ({"noise": {"initialSigma": 0.5}}, {"noise": {"initialSigma": 0.5}}),
    ],
)
def test_a_sampler_that_differs_from_the_learner_is_a_setting_and_no_other_is(group, setting):
    text = STUDY.replace(
        "model: {name: tiny}",
        f"model: {{name: tiny}}\n    rollouts: [{json.dumps({'name': 'main', **group})}]",
    )
    (other, *_) = plane_cells(study_document(text).spec)
    assert other.settings["sampler"] == setting
    assert "sampler" not in cell().settings
    assert not other.has_settings({k: v for k, v in other.settings.items() if k != "sampler"})


def test_the_adapters_that_a_cell_trains_are_a_setting_and_no_other_is():
    text = STUDY.replace("{name: tiny}", "{name: tiny, lora: {rank: 4}}")
    (other, *_) = plane_cells(study_document(text).spec)
    assert other.settings["lora"]["rank"] == 4
    assert "lora" not in cell().settings
    assert not other.has_settings({k: v for k, v in other.settings.items() if k != "lora"})


def test_a_condition_has_its_seeds_at_each_of_its_lags_and_no_tuning():
    text = STUDY.replace("  tuning: {seeds: [101]}\n", "").replace(
        "  claims: {lags: [0, 32], seeds: [1, 2, 3]}\n", ""
    )
    spec = study_document(text).spec
    # 3 lags, 2 rates, 2 methods, 2 seeds.
    assert len(plane_cells(spec)) == 24
    assert tuning_cells(spec) == []
    assert claims_cells(spec, {"vcpo": 1e-4}) == []


def test_a_method_whose_stages_changed_has_other_cells(monkeypatch):
    one = cell()
    then = one.settings
    stages = replace(LOSS_CONFIGS[Method.VCPO2], threshold=3.0)
    changed = {**LOSS_CONFIGS, Method.VCPO2: stages}
    monkeypatch.setattr("vcpo.api.algorithm.LOSS_CONFIGS", changed)
    assert not one.has_settings(then)


def cell_with_dead_band(value):
    algorithm = cell().spec.algorithm.model_copy(update={"dead_band": value})
    return replace(cell(), spec=cell().spec.model_copy(update={"algorithm": algorithm}))
