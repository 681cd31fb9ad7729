"""The study file, and the errors of a wrong one."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from research.study import cell_spec, load_study, model_directory
from tests.fixtures.models import write_model
from tests.fixtures.pretrained import smollm2
from tests.fixtures.study import STUDY, study, study_document, with_more_seeds
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.learning_rate import LearningRateRule
from vcpo.api import SpecError

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples" / "studies").glob("*.yaml"))
PRETRAINED = EXAMPLES[0].parent / "conditions" / "pretrained-model.yaml"
MODELS_TO_MAKE = {"larger-model"}
"""Conditions with a model that git ignores."""
CONDITIONS = sorted(set(PRETRAINED.parent.glob("*.yaml")) - {PRETRAINED})

__all__ = ["smollm2"]

SEED_OF_TUNING = "must not be seeds of `tuning` too; replace them in one of the two (got [101])"


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        study_document(text)
    return [str(problem) for problem in caught.value.problems]


def spec_of(method: str):
    return cell_spec(study(), study().method(method), lag=5, learning_rate=2e-4, seed=9)


def test_a_method_may_set_fields_of_the_optimizer():
    text = STUDY.replace("title: VCPO}", "title: VCPO, optimizer: {beta2: 0.5}}")
    other = study_document(text).spec
    spec = cell_spec(other, other.method("vcpo"), lag=5, learning_rate=2e-4, seed=9)
    assert (spec.optimizer.beta2, spec.optimizer.learning_rate) == (0.5, 2e-4)


def test_a_methods_fields_stand_over_those_of_the_run():
    algorithm = spec_of("plain").algorithm
    assert algorithm.loss_config.baseline is Baseline.GROUP_MEAN
    assert algorithm.learning_rate_rule is LearningRateRule.NONE
    assert algorithm.settings == {"weightCap": 4.0}


def test_what_nobody_names_keeps_its_default():
    assert spec_of("vcpo").algorithm.loss_config.baseline is Baseline.PESSIMISTIC


def test_lag_rate_and_seed_are_the_cells():
    spec = spec_of("vcpo")
    assert spec.algorithm.max_policy_lag_steps == 5
    assert spec.optimizer.learning_rate == 2e-4
    assert spec.seed == 9


def test_a_method_without_a_title_is_called_by_its_name():
    assert [method.label for method in study().methods] == ["VCPO", "plain"]


def test_a_wrong_field_of_a_method_is_named_where_it_stands():
    (problem,) = problems(STUDY.replace("groupMean", "groupMeen"))
    assert problem.startswith("spec.methods[1].algorithm.baseline: is unknown; use one of opob, ")
    assert problem.endswith(" (got 'groupMeen')")


@pytest.mark.parametrize("old", ["settings: {weightCap: 4.0}", "learningRateRule: none"])
def test_a_lag_outside_of_lags_is_refused(old):
    (problem,) = problems(STUDY.replace(old, "maxPolicyLagSteps: 3"))
    assert problem.endswith(
        "algorithm.maxPolicyLagSteps: is set by the study; remove it and use `lags` (got 3)"
    )


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("weightCap: 4.0}}", "weightCap: 4.0}}\n    optimizer: {X}", "run."),
        ("title: VCPO}", "title: VCPO, optimizer: {X}}", "methods[0]."),
    ],
)
def test_a_rate_outside_of_learning_rates_is_refused(old, new, field):
    (problem,) = problems(STUDY.replace(old, new.replace("X", "learningRate: 1.0e-4")))
    assert problem == (
        f"spec.{field}optimizer.learningRate: is set by the study; remove it and use"
        " `learningRates` (got 0.0001)"
    )


@pytest.mark.parametrize(("old", "field"), [("[1, 2]", "seeds"), ("[1, 2, 3]", "claims.seeds")])
def test_no_other_part_uses_a_seed_of_the_tuning(old, field):
    (problem,) = problems(STUDY.replace(f"seeds: {old}", "seeds: [1, 101]"))
    assert problem == f"spec.{field}: {SEED_OF_TUNING}"


@pytest.mark.parametrize(("old", "field"), [("[0, 32, 128]", "lags"), ("[0, 32],", "claims.lags")])
def test_the_synchronous_lag_is_among_the_lags(old, field):
    (problem,) = problems(STUDY.replace(f"lags: {old}", f"lags: {old.replace('0, ', '')}"))
    assert problem.startswith(f"spec.{field}: must hold 0, the synchronous run ")


def test_claims_are_made_for_methods_of_the_study_and_the_subject():
    unknown, without = problems(STUDY.replace("[1, 2, 3]}", "[1, 2, 3], methods: [other]}"))
    assert unknown == (
        "spec.claims.methods[0]: must name one of the methods: vcpo, plain (got 'other')"
    )
    assert without.startswith("spec.claims.methods: must hold the subject, 'vcpo'; add it")


@pytest.mark.parametrize(
    ("part", "given", "problem"),
    [
        (
            "plane",
            "lags: [2, 32, 0]",
            "moreSeeds[0].lags: must be among [32, 128]; remove the others (got [2, 0])",
        ),
        (
            "claims",
            "lags: [0, 128]",
            "claims.moreSeeds[0].lags: must be among [0, 32]; remove the others (got [128])",
        ),
        (
            "claims",
            "methods: [x, plain]",
            (
                "claims.moreSeeds[0].methods: must be among ['vcpo', 'plain']; remove the others"
                " (got ['x'])"
            ),
        ),
    ],
)
def test_more_seeds_name_lags_and_methods_of_their_part(part, given, problem):
    assert problems(with_more_seeds(part, f"seeds: [7], {given}")) == [f"spec.{problem}"]


def test_development_seeds_are_seeds_of_the_plane():
    text = STUDY.replace("  tuning:", "  developmentSeeds: [1, 9]\n  tuning:")
    message = "must be seeds of the plane, [1, 2]; remove the others (got [9])"
    assert problems(text) == [f"spec.developmentSeeds: {message}"]


@pytest.mark.parametrize(
    ("part", "field"), [("plane", "moreSeeds"), ("claims", "claims.moreSeeds")]
)
def test_more_seeds_are_none_of_the_tuning(part, field):
    (problem,) = problems(with_more_seeds(part, "seeds: [7, 101]"))
    assert problem == f"spec.{field}[0].seeds: {SEED_OF_TUNING}"


def test_the_subject_must_be_a_method():
    assert problems(STUDY.replace("subject: vcpo", "subject: v")) == [
        "spec.subject: must name one of the methods: vcpo, plain (got 'v')"
    ]


def test_two_methods_of_one_name_are_refused():
    (problem,) = problems(STUDY.replace("name: plain", "name: vcpo").replace(": plain", ": vcpo"))
    assert problem == (
        "spec.methods[1].name: another method has this name; give each its own (got 'vcpo')"
    )


def test_a_lag_given_twice_is_refused():
    (problem,) = problems(STUDY.replace("[0, 32, 128]", "[0, 32, 0]"))
    assert problem.startswith("spec.lags: holds a number twice")


@pytest.mark.parametrize(
    ("given", "field", "cause"),
    [
        ("batch: {promptPool: 9}\n    model: {name: tiny}", "batch.promptPool", "never come again"),
        (
            "model: {name: tiny}\n    rollouts: [{name: a}, {name: b}]",
            "rollouts",
            "has one sampler; keep one group (got 2)",
        ),
    ],
)
def test_what_a_run_can_do_and_a_study_does_not_is_refused(given, field, cause):
    (problem,) = problems(STUDY.replace("model: {name: tiny}", given))
    assert problem.startswith(f"spec.run.{field}: ")
    assert cause in problem


def test_the_study_of_the_examples_is_in_order():
    path = Path(__file__).resolve().parents[3] / "examples" / "study.yaml"
    example = load_study(path)
    assert example.spec.lags == (0, 2, 8, 32, 128)
    assert len(example.spec.claims.seeds) >= 5
    assert Path(model_directory(example, path)).is_dir()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_published_study_has_its_model_and_trains_for_twelve_times_its_largest_lag(path):
    example = load_study(path)
    assert example.metadata.name == path.stem
    assert Path(model_directory(example, path)).is_dir()
    assert example.spec.run.steps >= 12 * max(example.spec.lags)
    assert {"method"} <= set.intersection(*(set(one.algorithm) for one in example.spec.methods))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_candidates_of_a_published_study_are_half_a_decade_apart(path):
    rates = load_study(path).spec.learning_rates
    steps = [math.log10(high / low) for low, high in pairwise(rates)]
    assert steps == pytest.approx([0.5] * len(steps), abs=0.03)


def test_a_run_is_no_study(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(STUDY.replace("VCPOStudy", "VCPORun"), encoding="utf-8")
    with pytest.raises(SpecError, match="kind: Input should be 'VCPOStudy'"):
        load_study(path)


def test_a_model_beside_the_study_is_found(tmp_path):
    write_model(tmp_path / "tiny")
    assert model_directory(study_document(), tmp_path / "s.yaml") == str(tmp_path / "tiny")


def test_a_model_that_is_not_there_is_named(tmp_path):
    document = study_document(STUDY.replace("name: tiny", "name: ./tiny"))
    with pytest.raises(SpecError, match=r"spec\.run\.model\.name: is no directory "):
        model_directory(document, tmp_path / "s.yaml")


def test_a_held_rate_is_one_of_a_trust_region():
    text = STUDY.replace("{name: plain, ", "{name: plain, holdRateAtStep: 48, ")
    (problem,) = problems(text)
    assert problem == (
        "spec.methods[1].holdRateAtStep: holds the rate of a trust region; set "
        "learningRateRule: trustRegion (got 48)"
    )


def test_claims_need_a_tuning():
    (problem,) = problems(STUDY.replace("  tuning: {seeds: [101]}\n", ""))
    assert problem == (
        "spec.claims: needs rates that `tuning` finds; give `tuning` too, or remove it "
        "(got 'given')"
    )


def test_an_age_beyond_the_lag_is_refused():
    text = STUDY.replace("  subject:", "  ages: {shares: [0, 1.5]}\n  subject:")
    (problem,) = problems(text)
    assert problem == "spec.ages.shares[1]: Input should be less than or equal to 1 (got 1.5)"


def test_the_condition_with_a_pretrained_model_compares_five_methods_with_and_without_lag(smollm2):
    spec = load_study(PRETRAINED).spec
    assert model_directory(load_study(PRETRAINED), PRETRAINED) == str(smollm2)
    assert spec.tuning is None
    assert len(spec.methods) == 5
    assert spec.lags == (0, 16)
    assert spec.run.steps >= 6 * 16


@pytest.mark.parametrize("path", CONDITIONS, ids=lambda path: path.stem)
def test_a_condition_compares_the_default_with_three_others_at_the_rate_of_the_studies(path):
    condition = load_study(path)
    spec = condition.spec
    assert condition.metadata.name == path.stem
    if path.stem not in MODELS_TO_MAKE:
        assert Path(model_directory(condition, path)).is_dir()
    assert spec.tuning is None
    assert {method.name for method in spec.methods} == {"grpo", "vcpo", "vcpo-batch", "vcpo2"}
    assert (spec.subject, spec.learning_rates) == ("vcpo2", (1e-4,))
    assert spec.run.steps >= 12 * max(spec.lags)
    assert not {1, 2, 101, 102} & set(spec.seeds)
