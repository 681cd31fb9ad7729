"""The study file, and the errors of a wrong one."""

from pathlib import Path

import pytest

from research.study import cell_spec, load_study, model_directory
from research.tasks import Alternate, Sums, WriteDigits
from tests.fixtures.study import STUDY, study, study_document, with_more_seeds
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.verdict import LearningRateRule
from vcpo.api import SpecError
from vcpo_rollout.environments import Prompt, Split

STUDIES = Path(__file__).resolve().parents[3] / "examples" / "studies"
EXAMPLES = sorted(STUDIES.glob("*.yaml"))
MODELS_TO_MAKE = {"tool"}
"""Studies with a model that git ignores."""
SEED_OF_TUNING = "must not be seeds of `tuning` too; replace them in one of the two (got [101])"


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        study_document(text)
    return [str(problem) for problem in caught.value.problems]


def spec_of(method: str):
    return cell_spec(study(), study().method(method), lag=5, learning_rate=2e-4, seed=9)


def test_a_methods_fields_stand_over_those_of_the_run():
    algorithm = spec_of("plain").algorithm
    assert algorithm.loss_config.baseline is Baseline.GROUP_MEAN
    assert algorithm.learning_rate_rule is LearningRateRule.NONE
    assert algorithm.settings == {"weightCap": 4.0}


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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_published_study_has_its_model_and_trains_for_twelve_times_its_largest_lag(path):
    example = load_study(path)
    assert example.metadata.name == path.stem
    if path.stem not in MODELS_TO_MAKE:
        assert Path(model_directory(example, path)).is_dir()
    assert example.spec.run.steps >= 12 * max(example.spec.lags)
    assert {"method"} <= set.intersection(*(set(one.algorithm) for one in example.spec.methods))


@pytest.mark.parametrize(("field", "value"), [("holdRateAtStep", 48), ("fixedTarget", True)])
def test_a_control_of_a_trust_region_needs_one(field, value):
    text = STUDY.replace("{name: plain, ", f"{{name: plain, {field}: {str(value).lower()}, ")
    (problem,) = problems(text)
    assert problem == (
        f"spec.methods[1].{field}: is of a trust region; set learningRateRule: trustRegion "
        f"(got {value})"
    )


def test_each_wanted_digit_that_repeats_none_before_it_is_a_twelfth_of_the_reward():
    prompt = Prompt(text="", answer="112345")
    own, others = WriteDigits(seed=0), WriteDigits(seed=0, others=True)
    # Of 1, 1, 9, 2 and 1 the second repeats, and only 9 is not of the prompt.
    assert (own.reward(prompt, "11921"), others.reward(prompt, "11921")) == (3 / 12, 1 / 12)
    assert (own.reward(prompt, "12" * 9), others.reward(prompt, "12" * 9)) == (1.0, 0.0)


def test_each_digit_of_the_other_parity_than_the_one_before_is_a_twelfth_of_the_reward():
    prompt, task = Prompt(text="", answer="000001"), Alternate(seed=0)
    # Of 2, 3, 5 and x the 5 is odd as the 3, and x is no digit.
    assert [task.reward(prompt, each) for each in ("235x", "23" * 9, "")] == [2 / 12, 1.0, 0.0]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_512_held_out_sums_are_distinct_and_never_trained_on(seed):
    task = Sums(seed=seed)

    def numbers(split, index):
        text = task.prompt(split, index).text.removesuffix("=")
        return tuple(sorted(int(each) for each in text.split("+")))

    held_out = {numbers(Split.EVALUATION, index) for index in range(512)}
    trained = {numbers(Split.TRAIN, index) for index in range(10_000)}
    assert len(held_out) == 512
    assert not held_out & trained
    assert len(trained) > 2000


def test_a_sum_is_right_as_a_whole_only():
    prompt = Sums(seed=0).prompt(Split.EVALUATION, 0)
    first, second = prompt.text.removesuffix("=").split("+")
    total = int(first) + int(second)
    rewards = [Sums(seed=0).reward(prompt, each) for each in (f" {total}", f"{total}0", "", "x")]
    assert rewards == [1.0, 0.0, 0.0, 0.0]
