"""Every problem of a file is reported at once: the field, the value found, and the cure."""

from __future__ import annotations

import json
from textwrap import indent

import pytest

from vcpo.api import SpecError, parse_run

HEAD = "metadata: {name: r}\nspec:\n  model: {name: m}\n  environment: {name: countdown}\n"


def problems(spec: str) -> dict[str, str]:
    """Every problem of a run with these lines in its `spec`: path -> the rest of its line."""
    with pytest.raises(SpecError) as refused:
        parse_run(HEAD + indent(spec, "  "))
    return {problem.path: str(problem).partition(": ")[2] for problem in refused.value.problems}


def test_a_missing_field_is_named():
    assert problems("seed: 1") == {"spec.steps": "required field is missing"}


def test_an_unknown_field_is_shown_with_its_value():
    found = problems("steps: 3\nlearning_rate: 0.5")
    assert found == {
        "spec.learning_rate": "unknown field; remove it or correct its spelling (got 0.5)"
    }


def test_a_bound_is_reported_with_the_value_that_breaks_it():
    found = problems("steps: 0")
    assert found == {"spec.steps": "Input should be greater than or equal to 1 (got 0)"}


@pytest.mark.parametrize("field", ["model.name", "model.revision", "environment.name"])
def test_a_nul_character_that_no_path_may_hold_is_reported(field: str):
    section, name = field.split(".")
    spec = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 3}
    spec[section] = {**spec[section], name: "a.b:C\0"}
    with pytest.raises(SpecError) as refused:
        parse_run(json.dumps({"metadata": {"name": "r"}, "spec": spec}))
    (problem,) = refused.value.problems
    told = "contains a NUL character, which paths and names may not; delete it (got 'a.b:C\\x00')"
    assert str(problem) == f"spec.{field}: {told}"


def test_all_problems_come_together():
    found = problems("""
seed: -1
algorithm: {maxPolicyLagSteps: -1, lag: 3}
optimizer: {learningRate: fast, beta1: 1.0}
rollouts: [{name: a, maxReplicas: 0}, {name: B}]
""")
    assert sorted(found) == [
        "spec.algorithm.lag",
        "spec.algorithm.maxPolicyLagSteps",
        "spec.optimizer.beta1",
        "spec.optimizer.learningRate",
        "spec.rollouts[0].maxReplicas",
        "spec.rollouts[1].name",
        "spec.seed",
        "spec.steps",
    ]


def test_several_problems_are_counted_and_listed_a_line_each():
    with pytest.raises(SpecError) as refused:
        parse_run("{}", source="run.yaml")
    assert str(refused.value).splitlines() == [
        "run.yaml: 2 problems",
        "  metadata: required field is missing",
        "  spec: required field is missing",
    ]


def test_a_long_value_is_shortened_to_eighty_characters():
    with pytest.raises(SpecError) as refused:
        parse_run(f"{HEAD}  steps: {'x' * 500}")
    (problem,) = refused.value.problems
    assert problem.value == "'" + "x" * 76 + "..."


class TestValuesAreNotBentToFit:
    """What a cluster's schema refuses is refused here."""

    @pytest.mark.parametrize(
        ("lines", "field"),
        [
            ("steps: '10'", "spec.steps"),
            ("steps: true", "spec.steps"),
            ("steps: 10.5", "spec.steps"),
            ("steps: 3\nsuspend: yes", "spec.suspend"),
            ("steps: 3\nsuspend: 1", "spec.suspend"),
            ("steps: 3\noptimizer: {learningRate: '0.1'}", "spec.optimizer.learningRate"),
            ("steps: 3\noptimizer: {learningRate: .nan}", "spec.optimizer.learningRate"),
            ("steps: 3\noptimizer: {maxGradientNorm: .inf}", "spec.optimizer.maxGradientNorm"),
            ("steps: 3\nlearner: {template: {spec: {x: [-.inf]}}}", "spec.learner.template"),
            ("steps: 3\nrollouts: {name: main}", "spec.rollouts"),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, lines, field):
        assert list(problems(lines)) == [field]

    @pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e400", "[{a: .nan}]"])
    def test_a_parameter_that_json_cannot_hold_is_refused(self, number):
        # The run directory's copy of the file would hold null in its place.
        run = HEAD.replace("countdown", f"'a:B', parameters: {{limit: {number}}}")
        with pytest.raises(SpecError, match=r"spec\.environment\.parameters: .* infinite or NaN"):
            parse_run(f"{run}  steps: 3")

    def test_a_whole_number_is_a_real_number(self):
        run = parse_run(f"{HEAD}  steps: 3\n  sampling: {{temperature: 1}}")
        assert run.spec.sampling.temperature == 1.0
