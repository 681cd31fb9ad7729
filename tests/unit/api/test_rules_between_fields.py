"""Rules that compare fields, each blamed on the field to change."""

from textwrap import indent
from typing import Any

import pytest

from tests.fixtures.broken_specs import BROKEN_SPECS
from tests.fixtures.operator.runs import document
from vcpo.api import SpecError, VCPORun, parse_run

MINIMUM = "metadata: {name: r}\nspec:\n  model: {name: m}\n  steps: 3\n"
HEAD = MINIMUM + "  environment: {name: countdown}\n"


def run_with(spec: str) -> VCPORun:
    return parse_run(HEAD + indent(spec, "  "))


def paths_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as refused:
        parse_run(text)
    return [problem.path.removeprefix("spec.") for problem in refused.value.problems]


def paths(spec: str) -> list[str]:
    return paths_of(HEAD + indent(spec, "  "))


@pytest.mark.parametrize(("spec", "path", "_"), BROKEN_SPECS)
def test_a_broken_rule_is_blamed_on_its_field(spec: dict[str, Any], path: str, _: str):
    assert paths_of(repr(document(**spec))) == [path]


@pytest.mark.parametrize("baseline", ["opob", "pessimistic", "groupMean", "rloo", "grpo"])
def test_a_baseline_over_others_needs_two_trajectories(baseline):
    algorithm = f"algorithm: {{baseline: {baseline}, baselineScope: group}}"
    for batch in ("{trajectoriesPerPrompt: 1}", "{trajectoriesPerPrompt: 1, promptsPerStep: 1}"):
        assert paths(f"batch: {batch}\n{algorithm}") == ["batch.trajectoriesPerPrompt"]
    assert paths("batch: {trajectoriesPerPrompt: 1, promptsPerStep: 1}") == [
        "batch.trajectoriesPerPrompt"
    ]


@pytest.mark.parametrize("baseline", ["rloo", "grpo", "none"])
def test_a_baseline_defined_on_groups_cannot_span_the_batch(baseline):
    lines = f"algorithm: {{baselineScope: batch, baseline: {baseline}}}"
    assert paths(lines) == ["algorithm.baselineScope"]


@pytest.mark.parametrize(
    "spec",
    [
        "rollouts: [{name: a, minReplicas: 3, maxReplicas: 3}]",
        "batch: {trajectoriesPerPrompt: 1}\nalgorithm: {baseline: none}",
        "batch: {trajectoriesPerPrompt: 1}",
        "batch: {trajectoriesPerPrompt: 1, promptsPerStep: 2}\nalgorithm: {baseline: groupMean}",
        "algorithm: {baselineScope: batch, baseline: opob}",
        "algorithm: {baselineScope: batch, baseline: pessimistic}",
        "algorithm: {baselineScope: batch, baseline: groupMean}",
        "batch: {promptPool: 100, promptSelection: sequential}",
        "batch: {promptPool: 100, promptSelection: teacher}",
        "algorithm: {method: tba, onPolicyProbability: 0.9}\nbatch: {promptPool: 5}",
        "optimizer: {warmupSteps: 1000000}",
        "optimizer: {name: muon}",
        "rollouts: [{name: a, engine: 'own:Engine', engineArguments: {dtype: half}}]",
        "sampling: {maxNewTokens: 512}\nrollouts: [{name: a, maxModelLen: 513}]",
        "learner: {gradientMode: onePass}",
        "learner: {gradientMode: onePass}\nalgorithm: {baselineScope: batch}",
        "learner: {gradientMode: onePass}\nalgorithm: {baseline: rloo}",
    ],
)
def test_a_kept_rule_refuses_nothing(spec):
    assert run_with(spec)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ("rollouts: [{name: a}, {name: b}, {name: a}]", "rollouts[2].name"),
        (
            "algorithm: {onPolicyProbability: 0.9}\nbatch: {promptPool: 5}",
            "algorithm.onPolicyProbability",
        ),
        (
            "rollouts: [{name: a, engine: hf, engineArguments: {block_size: 32}}]",
            "rollouts[0].engineArguments",
        ),
        ("rollouts: [{name: a, engine: my-package:Own}]", "rollouts[0].engine"),
        ("rollouts: [{name: a, engine: ':Own'}]", "rollouts[0].engine"),
        ("rollouts: [{name: a, engine: 'a:b:c'}]", "rollouts[0].engine"),
        ("sampling: {topP: 0.9}", "sampling.topP"),
        ("sampling: {topK: 50}", "sampling.topK"),
        ("sampling: {stopStrings: ['']}", "sampling.stopStrings[0]"),
        ("sampling: {stopStrings: [a, b, a]}", "sampling.stopStrings[2]"),
        ("sampling: {stopStrings: ['\ufffd']}", "sampling.stopStrings[0]"),
        ("tracking: {sinks: [{name: tensorboard, project: p}]}", "tracking.sinks[0].project"),
        ("tracking: {sinks: [{name: wandb}, {name: wandb}]}", "tracking.sinks[1].name"),
        ("tracking: {sinks: [{name: wandb, parameters: {a: 1}}]}", "tracking.sinks[0].parameters"),
        (
            "tracking: {sinks: [{name: 'own:Sink', parameters: {a: 1}, project: p}]}",
            "tracking.sinks[0].project",
        ),
        ("learner: {gradientMode: onePass}\nalgorithm: {baseline: mine:b}", "learner.gradientMode"),
    ],
)
def test_a_rule_that_only_the_model_knows_is_blamed_on_its_field(spec, path):
    assert paths(spec) == [path]


def test_several_broken_rules_come_together():
    prompts = "batch: {trajectoriesPerPrompt: 1, promptsPerStep: 1}"
    assert paths(f"{prompts}\nrollouts: [{{name: a}}, {{name: a}}]") == [
        "batch.trajectoriesPerPrompt",
        "rollouts[1].name",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("parameters: {digit: 5, seed: 1}", ["parameters.seed", "parameters.digit"]),
        ("rewards: [{name: environment, parameters: {a: 1}}]", ["rewards[0].parameters.a"]),
        ("templateArguments: {tokenize: true}", ["templateArguments.tokenize"]),
        ("promptFormat: plain, templateArguments: {think: true}", ["templateArguments"]),
    ],
)
def test_what_an_environment_does_not_take_is_refused(environment, expected):
    text = f"{MINIMUM}  environment: {{name: sort_digits, {environment}}}"
    assert paths_of(text) == [f"environment.{each}" for each in expected]


@pytest.mark.parametrize("name", ["tasks:Chess", "verifiers:wordle"])
def test_of_environments_that_are_not_shipped_a_file_says_nothing(name):
    run = parse_run(f"{MINIMUM}  environment: {{name: '{name}', parameters: {{whatever: 1}}}}")
    assert run.spec.environment.parameters == {"whatever": 1}


@pytest.mark.parametrize(
    "given",
    ["kvCacheGibibytes: 2.0", "kvCache: keep", "tensorParallelSize: 2", "engineArguments: {a: 1}"],
)
def test_what_hf_does_not_use_chooses_vllm(given):
    for other in ("vllm", "my_package.engines:Own"):
        assert run_with(f"rollouts: [{{name: a, engine: '{other}', {given}}}]").spec.rollouts
    (group,) = run_with(f"rollouts: [{{name: a, {given}}}]").spec.rollouts
    assert group.engine_name == "vllm"


@pytest.mark.parametrize(
    "argument",
    ["dtype: half", "tensor_parallel_size: 2", "enable_lora: true", "pipeline_parallel_size: 2"],
)
def test_an_argument_of_vllm_that_something_else_sets_is_refused_by_name(argument):
    name = argument.partition(":")[0]
    group = f"{{name: a, engine: vllm, engineArguments: {{{argument}}}}}"
    assert paths(f"rollouts: [{group}]") == [f"rollouts[0].engineArguments.{name}"]


def test_stop_strings_are_bounded_in_number_and_size():
    longest = ["x" * 255 + letter for letter in "abcdefghijklmnop"]
    assert run_with(f"sampling: {{stopStrings: {longest}}}").spec.sampling.stop_strings == (
        tuple(longest)
    )
    assert paths(f"sampling: {{stopStrings: {[*longest, 'q']}}}") == ["sampling.stopStrings"]
    assert paths(f"sampling: {{stopStrings: [{'x' * 257}]}}") == ["sampling.stopStrings[0]"]


@pytest.mark.parametrize(
    ("groups", "context_tokens"),
    [
        ("{name: a}", None),
        ("{name: a, maxModelLen: 2048}, {name: b, maxModelLen: 4096}", 4096),
        ("{name: a, maxModelLen: 2048}, {name: b}", None),
    ],
)
def test_the_context_of_a_run_is_the_longest_of_its_groups(groups, context_tokens):
    assert run_with(f"rollouts: [{groups}]").spec.context_tokens == context_tokens


@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_a_temperature_that_vllm_does_not_sample_at_is_refused(section):
    def lines(temperature, engine):
        groups = f"rollouts: [{{name: a}}, {{name: b, engine: {engine}}}]"
        return f"{section}: {{temperature: {temperature}}}\n{groups}"

    assert paths(lines(2.5, "vllm")) == [f"{section}.temperature"]
    assert run_with(lines(2.0, "vllm")).spec.rollouts
    assert run_with(lines(2.5, "hf")).spec.rollouts


def test_a_call_of_the_environment_has_half_of_a_lease():
    text = f"{MINIMUM}  environment: {{name: countdown}}\n  lease: {{timeoutSeconds: 90}}\n"
    assert parse_run(text).spec.environment_timeout_s == 45.0
