"""Rules that compare fields, each blamed on the field to change."""

from __future__ import annotations

from textwrap import indent

import pytest

from vcpo.api import SpecError, VCPORun, parse_run
from vcpo.api.environments import BUILT_IN_REWARDS

MINIMUM = "metadata: {name: r}\nspec:\n  model: {name: m}\n  steps: 3\n"
HEAD = MINIMUM + "  environment: {name: countdown}\n"


def run_with(spec: str) -> VCPORun:
    return parse_run(HEAD + indent(spec, "  "))


def problem_lines(spec: str) -> list[str]:
    with pytest.raises(SpecError) as refused:
        run_with(spec)
    return [str(problem) for problem in refused.value.problems]


def test_more_workers_at_least_than_at_most_are_refused():
    assert problem_lines("rollouts: [{name: a, minReplicas: 3, maxReplicas: 2}]") == [
        "spec.rollouts[0].maxReplicas: must be at least `minReplicas` (3) (got 2)"
    ]


def test_as_many_workers_at_least_as_at_most_are_fine():
    assert run_with("rollouts: [{name: a, minReplicas: 3, maxReplicas: 3}]").spec.rollouts


def test_two_groups_of_one_name_are_refused_at_the_second():
    assert problem_lines("rollouts: [{name: a}, {name: b}, {name: a}]") == [
        "spec.rollouts[2].name: another group has this name; give each group its own (got 'a')"
    ]


@pytest.mark.parametrize(
    "baseline",
    ["opob", "pessimistic", "groupMean", "rloo", "grpo"],
)
def test_a_baseline_over_others_needs_two_trajectories(baseline):
    lines = f"batch: {{trajectoriesPerPrompt: 1}}\nalgorithm: {{baseline: {baseline}}}"
    (line,) = problem_lines(lines)
    rule = f"must be at least 2 for the baseline '{baseline}' (got 1)"
    assert line == f"spec.batch.trajectoriesPerPrompt: {rule}"


def test_without_a_baseline_one_trajectory_is_enough():
    run = run_with("batch: {trajectoriesPerPrompt: 1}\nalgorithm: {baseline: none}")
    assert run.spec.batch.trajectories == 16


@pytest.mark.parametrize("baseline", ["rloo", "grpo", "none"])
def test_a_baseline_defined_on_groups_cannot_span_the_batch(baseline):
    lines = f"algorithm: {{baselineScope: batch, baseline: {baseline}}}"
    (line,) = problem_lines(lines)
    allowed = "'opob', 'pessimistic', 'groupMean'"
    rule = f"'batch' needs a `baseline` of {allowed}, not '{baseline}'"
    assert line == f"spec.algorithm.baselineScope: {rule} (got 'batch')"


@pytest.mark.parametrize("baseline", ["opob", "pessimistic", "groupMean"])
def test_a_mean_may_span_the_batch(baseline):
    run = run_with(f"algorithm: {{baselineScope: batch, baseline: {baseline}}}")
    assert run.spec.algorithm.baseline == baseline


def test_a_choice_of_prompts_needs_something_to_choose_among():
    (line,) = problem_lines("batch: {promptSelection: teacher}")
    rule = "needs `promptPool`; give its number of prompts or use 'sequential'"
    assert line == f"spec.batch.promptSelection: {rule} (got 'teacher')"


@pytest.mark.parametrize("selection", ["sequential", "teacher"])
def test_a_pool_suits_every_choice_of_prompts(selection):
    run = run_with(f"batch: {{promptPool: 100, promptSelection: {selection}}}")
    assert run.spec.batch.prompt_pool == 100


def test_stored_responses_need_prompts_that_repeat():
    lines = "algorithm: {method: tba, onPolicyProbability: 0.9}"
    (line,) = problem_lines(lines)
    rule = "stored responses need prompts that repeat; give `batch.promptPool`"
    assert line == f"spec.algorithm.onPolicyProbability: {rule} (got 0.9)"
    run_with(lines + "\nbatch: {promptPool: 5}")


def test_methods_with_importance_weights_do_not_replay_responses():
    lines = "algorithm: {onPolicyProbability: 0.9}\nbatch: {promptPool: 5}"
    (line,) = problem_lines(lines)
    rule = "method 'vcpo2' does not use it; remove it or use 'tba', 'agro'"
    assert line == f"spec.algorithm.onPolicyProbability: {rule} (got 0.9)"


def test_a_worker_must_hold_a_whole_group():
    lines = "batch: {trajectoriesPerPrompt: 9}\nrollouts: [{name: a, maxConcurrentSequences: 8}]"
    (line,) = problem_lines(lines)
    rule = "must be at least `batch.trajectoriesPerPrompt` (9) (got 8)"
    assert line == f"spec.rollouts[0].maxConcurrentSequences: {rule}"


def test_a_schedule_must_have_steps_after_the_warmup():
    (line,) = problem_lines("optimizer: {schedule: cosine, warmupSteps: 1000000}")
    assert line.startswith("spec.optimizer.warmupSteps: must be less than `steps` (")
    assert line.endswith(") for the schedule 'cosine' (got 1000000)")
    assert run_with("optimizer: {warmupSteps: 1000000}").spec.optimizer.warmup_steps == 10**6


def test_several_ranks_need_adamw():
    (line,) = problem_lines("optimizer: {name: muon}\nlearner: {processes: 2}")
    assert line == "spec.optimizer.name: must be 'adamw' for several ranks (2) (got 'muon')"
    assert run_with("optimizer: {name: muon}").spec.optimizer.name == "muon"


def test_several_broken_rules_come_together():
    found = problem_lines("""
batch: {trajectoriesPerPrompt: 1}
rollouts: [{name: a}, {name: a}, {name: a}]
""")
    assert [line.partition(": ")[0] for line in found] == [
        "spec.batch.trajectoriesPerPrompt",
        "spec.rollouts[1].name",
        "spec.rollouts[2].name",
    ]


def environment_lines(environment: str) -> list[str]:
    with pytest.raises(SpecError) as refused:
        parse_run(f"{MINIMUM}  environment: {environment}")
    return [str(problem) for problem in refused.value.problems]


def test_an_unknown_environment_is_refused_with_those_there_are():
    (line,) = environment_lines("{name: chess}")
    names = "countdown, data_set, gsm8k, math, sort_digits"
    known = f"{names}, or package.module:Class"
    assert line == (
        f"spec.environment.name: is unknown; use one of {known} for your own (got 'chess')"
    )


def test_every_unknown_parameter_is_refused_with_those_there_are():
    lines = environment_lines("{name: sort_digits, parameters: {digit: 5, seed: 1, style: x}}")
    cures = (
        "seed: is not a parameter; remove it and set the run's `seed` (got 1)",
        "digit: 'sort_digits' has no such parameter; it takes digits, style (got 5)",
    )
    assert lines == [f"spec.environment.parameters.{cure}" for cure in cures]


def test_an_unknown_reward_is_refused_with_those_there_are():
    lines = environment_lines(
        "{name: sort_digits, rewards: [{name: exact}, {name: environment, parameters: {a: 1}}]}"
    )
    known = ", ".join(sorted(BUILT_IN_REWARDS))
    assert set(lines) == {
        (
            f"spec.environment.rewards[0].name: is unknown; use one of {known}, or"
            " package.module:function for your own (got 'exact')"
        ),
        (
            "spec.environment.rewards[1].parameters.a: 'environment' has no such parameter; it"
            " takes none (got 1)"
        ),
    }


def test_arguments_of_a_template_need_one_and_are_not_the_workers():
    arguments = "templateArguments: {tokenize: true, enable_thinking: false}"
    (line,) = environment_lines(f"{{name: sort_digits, {arguments}}}")
    assert line == (
        "spec.environment.templateArguments.tokenize: the worker sets it; remove it (got True)"
    )
    (line,) = environment_lines(f"{{name: sort_digits, promptFormat: plain, {arguments}}}")
    assert line.startswith("spec.environment.templateArguments: needs a `promptFormat` of 'chat'")


@pytest.mark.parametrize("name", ["tasks:Chess", "verifiers:wordle"])
def test_of_environments_that_are_not_shipped_a_file_says_nothing(name):
    run = parse_run(f"{MINIMUM}  environment: {{name: '{name}', parameters: {{whatever: 1}}}}")
    assert run.spec.environment.parameters == {"whatever": 1}


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("kvCacheGibibytes", "2.0", "2.0"),
        ("kvCache", "keep", "'keep'"),
        ("tensorParallelSize", "2", "2"),
        ("engineArguments", "{block_size: 32}", "{'block_size': 32}"),
    ],
)
def test_what_hf_does_not_use_is_refused_for_it_alone(field, value, got):
    given = f"{field}: {value}"
    assert problem_lines(f"rollouts: [{{name: a, engine: hf, {given}}}]") == [
        (
            f"spec.rollouts[0].{field}: engine 'hf' does not use it; remove it or use"
            f" engine 'vllm' (got {got})"
        )
    ]
    for other in ("vllm", "my_package.engines:Own"):
        assert run_with(f"rollouts: [{{name: a, engine: '{other}', {given}}}]").spec.rollouts
    (group,) = run_with(f"rollouts: [{{name: a, {given}}}]").spec.rollouts
    assert group.engine_name == "vllm"


@pytest.mark.parametrize("name", ["vlm", "package.module", "my-package:Own", ":Own", "a:b:c"])
def test_an_engine_is_a_shipped_one_or_a_class(name):
    assert problem_lines(f"rollouts: [{{name: a, engine: '{name}'}}]") == [
        (
            "spec.rollouts[0].engine: is unknown; use one of hf, vllm, or package.module:Class"
            f" for your own (got '{name}')"
        )
    ]


def test_an_own_engine_may_have_arguments_that_other_fields_set_for_vllm():
    run = run_with("rollouts: [{name: a, engine: 'own:Engine', engineArguments: {dtype: half}}]")
    assert run.spec.rollouts[0].engine_arguments == {"dtype": "half"}


@pytest.mark.parametrize(
    ("argument", "cure"),
    [
        ("dtype: half", "set `precision` instead (got 'half')"),
        ("tensor_parallel_size: 2", "set `tensorParallelSize` instead (got 2)"),
        ("enable_lora: true", "`model.lora` decides it; remove it (got True)"),
        (
            "pipeline_parallel_size: 2",
            (
                "a worker is one engine on one machine; use `tensorParallelSize` and"
                " `maxReplicas` (got 2)"
            ),
        ),
    ],
)
def test_an_argument_of_vllm_that_something_else_sets_is_refused_by_name(argument, cure):
    name = argument.partition(":")[0]
    group = f"{{name: a, engine: vllm, engineArguments: {{{argument}}}}}"
    assert problem_lines(f"rollouts: [{group}]") == [
        f"spec.rollouts[0].engineArguments.{name}: {cure}"
    ]


@pytest.mark.parametrize("field", ["topP: 0.9", "topK: 50"])
def test_sampling_from_a_part_of_the_vocabulary_is_refused_with_the_reason(field):
    name, _, value = field.partition(": ")
    (line,) = problem_lines(f"sampling: {{{field}}}")
    assert line.startswith(f"spec.sampling.{name}: is not supported: it draws tokens from a part")
    assert line.endswith(f"remove it, or lower `temperature` (got {value})")


@pytest.mark.parametrize(
    ("strings", "problem"),
    [
        ("['']", "[0]: String should have at least 1 character (got '')"),
        ("[a, b, a]", "[2]: is there twice; remove one (got 'a')"),
        (
            "['\ufffd']",
            (
                "[0]: has U+FFFD, which stands for a part of a character, not for text; remove it"
                " (got '\ufffd')"
            ),
        ),
    ],
)
def test_a_stop_string_that_ends_no_response_or_every_one_is_refused(strings, problem):
    assert problem_lines(f"sampling: {{stopStrings: {strings}}}") == [
        f"spec.sampling.stopStrings{problem}"
    ]


def test_stop_strings_are_bounded_in_number_and_size():
    longest = ["x" * 255 + letter for letter in "abcdefghijklmnop"]
    assert run_with(f"sampling: {{stopStrings: {longest}}}").spec.sampling.stop_strings == (
        tuple(longest)
    )
    (line,) = problem_lines(f"sampling: {{stopStrings: {[*longest, 'q']}}}")
    assert line.startswith("spec.sampling.stopStrings: Tuple should have at most 16 items")
    (line,) = problem_lines(f"sampling: {{stopStrings: [{'x' * 257}]}}")
    assert line.startswith(
        "spec.sampling.stopStrings[0]: String should have at most 256 characters (got 'xxx"
    )


def test_a_context_that_leaves_no_room_for_a_prompt_is_refused():
    def lines(length):
        return f"sampling: {{maxNewTokens: 512}}\nrollouts: [{{name: a, maxModelLen: {length}}}]"

    assert problem_lines(lines(512)) == [
        (
            "spec.rollouts[0].maxModelLen: must be more than `sampling.maxNewTokens` (512):"
            " prompts need room (got 512)"
        )
    ]
    assert run_with(lines(513)).spec.rollouts[0].max_model_len == 513


@pytest.mark.parametrize(
    ("groups", "context_tokens"),
    [
        ("{name: a}", None),
        ("{name: a, maxModelLen: 2048}", 2048),
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

    assert problem_lines(lines(2.5, "vllm")) == [
        (
            f"spec.{section}.temperature: must be at most 2.0 for engine 'vllm',"
            " which rollout group 'b' uses (got 2.5)"
        )
    ]
    assert run_with(lines(2.0, "vllm")).spec.rollouts
    assert run_with(lines(2.5, "hf")).spec.rollouts


@pytest.mark.parametrize(
    ("sinks", "problem"),
    [
        (
            "[{name: tensorboard, project: p}]",
            "sinks[0].project: sink 'tensorboard' does not use it; remove it (got 'p')",
        ),
        (
            "[{name: tensorboard, mode: offline}]",
            "sinks[0].mode: sink 'tensorboard' does not use it; remove it (got 'offline')",
        ),
        ("[{name: wandb}, {name: wandb}]", "sinks[1].name: is there twice; remove one (got"),
        ("[{name: comet}]", "sinks[0].name: is unknown; use one of tensorboard, wandb, or"),
        (
            "[{name: wandb, parameters: {a: 1}}]",
            "sinks[0].parameters: sink 'wandb' does not use it; remove it (got",
        ),
        (
            "[{name: 'own:Sink', parameters: {a: 1}, project: p}]",
            "sinks[0].project: sink 'own:Sink' does not use it; remove it (got 'p')",
        ),
    ],
)
def test_a_sink_takes_the_fields_of_its_service_once(sinks, problem):
    (line,) = problem_lines(f"tracking: {{sinks: {sinks}}}")
    assert line.startswith(f"spec.tracking.{problem}")


def test_a_destination_has_one_place():
    (line,) = problem_lines("pods: {extraEgress: [{port: 1, cidr: 10.0.0.0/8, namespace: obs}]}")
    assert line.startswith("spec.pods.extraEgress[0].cidr: may not be given beside `namespace`")


def test_a_system_prompt_in_plain_text_is_refused():
    with pytest.raises(SpecError) as refused:
        parse_run(
            MINIMUM + "  environment: {name: countdown, systemPrompt: Sum., promptFormat: plain}\n"
        )
    (problem,) = refused.value.problems
    rule = "needs a `promptFormat` of 'chat' or 'auto', not 'plain' (got 'Sum.')"
    assert str(problem) == f"spec.environment.systemPrompt: {rule}"


def test_a_call_of_the_environment_has_half_of_a_lease():
    text = f"{MINIMUM}  environment: {{name: countdown}}\n  lease: {{timeoutSeconds: 90}}\n"
    assert parse_run(text).spec.environment_timeout_s == 45.0


@pytest.mark.parametrize(
    ("algorithm", "is_fine"),
    [
        ("{}", True),
        ("{method: grpo}", False),
        ("{baselineScope: batch}", True),
        ("{baseline: mine:b}", False),
        ("{loss: mine:soft}", False),
        ("{baseline: rloo}", True),
    ],
)
def test_one_pass_is_for_methods_whose_groups_decide_for_themselves(algorithm, is_fine):
    lines = f"learner: {{gradientMode: onePass}}\nalgorithm: {algorithm}"
    if is_fine:
        assert run_with(lines).spec.learner.gradient_mode == "onePass"
    else:
        rule = "the method or its baseline needs two passes; use 'auto'"
        assert problem_lines(lines) == [f"spec.learner.gradientMode: {rule} (got 'onePass')"]
