"""Fields that a command line sets in place of the file."""

from __future__ import annotations

import pytest

from vcpo.api import SpecError, load_run

FILE = """
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 400
  rollouts: [{name: a}, {name: b}]
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    return file


def problem_of(path, *changes: str) -> str:
    with pytest.raises(SpecError) as refused:
        load_run(path, changes)
    return str(refused.value)


def test_a_field_is_set_with_or_without_the_name_of_its_section(path):
    run = load_run(path, ["algorithm.maxPolicyLagSteps=12", "spec.steps=20", "metadata.name=other"])
    assert run.spec.algorithm.max_policy_lag_steps == 12
    assert (run.spec.steps, run.metadata.name) == (20, "other")


def test_a_value_is_read_as_in_the_file(path):
    changes = ["optimizer.learningRate=1e-5", "sampling.stopStrings=['.']", "model.lora={rank: 4}"]
    spec = load_run(path, changes).spec
    assert spec.optimizer.learning_rate == 1e-5
    assert list(spec.sampling.stop_strings) == ["."]
    assert spec.model.model_dump()["lora"]["rank"] == 4


def test_an_item_of_a_list_is_counted_from_zero(path):
    groups = load_run(path, ["rollouts[1].maxReplicas=7"]).spec.rollouts
    assert [each.max_replicas for each in groups][1] == 7
    assert groups[0].max_replicas != 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps", "'steps' must be FIELD=VALUE, such as algorithm.maxPolicyLagSteps=12"),
        ("steps=many", "spec.steps: Input should be a valid integer"),
        ("steps=[", "is not YAML"),
        ("algorithm.lag=1", "spec.algorithm.lag: unknown field"),
        ("rollouts.maxReplicas=1", "name an item, such as spec.rollouts[0].maxReplicas"),
        ("rollouts.1.maxReplicas=1", "has no 1; name an item, such as spec.rollouts[1]"),
        ("rollouts[2].maxReplicas=1", "spec.rollouts has 2 items in the file"),
        ("evaluation[0]=1", "has no items in the file"),
        ("steps.x=1", "spec.steps is no section in the file, so it has no x"),
        ("steps..x=1", "'steps..x' names no field"),
    ],
)
def test_a_change_that_fits_nowhere_is_refused_with_its_cure(path, change, words):
    assert words in problem_of(path, change)
