"""The cells of a study, and when a record is one of a cell."""

import json
from dataclasses import replace

import pytest

from research.cells.cell import claims_cells, plane_cells, tuning_cells
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


def test_more_seeds_are_of_their_lags_and_methods_only():
    given = "lags: [32], methods: [plain], seeds: [7]"
    plane = plane_cells(study_document(with_more_seeds("plane", given)).spec)
    claims = claims_cells(study_document(with_more_seeds("claims", given)).spec, RATES)
    for cells, without in ((plane, plane_cells(study())), (claims, claims_cells(study(), RATES))):
        assert {(each.method, each.lag) for each in cells if each.seed == 7} == {("plain", 32)}
        assert [each for each in cells if each.seed != 7] == without


def test_a_cell_of_plane_and_claims_is_one_cell():
    plane = {each.name: each for each in plane_cells(study())}
    claims = {each.name: each for each in claims_cells(study(), RATES)}
    shared = plane.keys() & claims.keys()
    assert len(shared) == 2 * 2  # methods, seeds 1 and 2 at lag 32
    assert all(plane[name] == claims[name] for name in shared)


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
    shorter = spec.lease.model_copy(update={"timeout_seconds": 7})
    changed = spec.model_copy(update={"lease": shorter})
    assert replace(cell(), spec=changed).settings == cell().settings


def test_a_record_older_than_a_setting_is_of_the_cell_that_has_its_default():
    older = {
        name: value for name, value in cell().settings.items() if name != "algorithm.refuseBelow"
    }
    assert cell().has_settings(older)
    assert not cell_that_refuses_below(0.5).has_settings(older)


def test_a_record_made_with_another_default_is_of_another_cell():
    then = {**cell().settings, "optimizer.epsilon": 1e-6}
    assert not cell().has_settings(then)


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


def test_a_method_whose_stages_changed_has_other_cells(monkeypatch):
    one = cell()
    then = one.settings
    stages = replace(LOSS_CONFIGS[Method.VCPO2], threshold=3.0)
    changed = {**LOSS_CONFIGS, Method.VCPO2: stages}
    monkeypatch.setattr("vcpo.api.algorithm.LOSS_CONFIGS", changed)
    assert not one.has_settings(then)


def cell_that_refuses_below(value):
    algorithm = cell().spec.algorithm.model_copy(update={"refuse_below": value})
    return replace(cell(), spec=cell().spec.model_copy(update={"algorithm": algorithm}))
