"""Every problem of a file is reported at once: the field, the value found, and the fix."""

import json
import re
import typing
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from scripts.render_reference import FIRST, rendered_page
from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.verdict import LearningRateRule
from vcpo.algo.methods import LOSS_CONFIGS, Aggregation, Clipping, Method, Weight
from vcpo.api import API_VERSION, KIND, SpecError, VCPORun, json_schema, load_run, parse_run
from vcpo.api.advice import algorithm_warnings, batch_warnings, rollout_warnings
from vcpo.api.algorithm import Algorithm, Batch
from vcpo.api.errors import problems_of
from vcpo.api.files import _ELSEWHERE, _fields
from vcpo.api.run import VCPORunSpec
from vcpo.api.workloads import Model, RolloutGroup

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
        ("metadata.name=My_Run", "metadata.name: must be lower-case letters, digits and '-'"),
        ("weights.storeUrl=x", "spec.weights.storeUrl: must be an absolute path, or a URL such as"),
        ("steps=[", "is not YAML"),
        ("algorithm.lag=1", "spec.algorithm.lag: unknown field"),
        ("rollouts.maxReplicas=1", "name an item, such as spec.rollouts[0].maxReplicas"),
        ("rollouts.1.maxReplicas=1", "has no 1; name an item, such as spec.rollouts[1]"),
        ("rollouts[2].maxReplicas=1", "spec.rollouts has 2 items in the file"),
        ("evaluation[0]=1", "has no items in the file"),
        ("steps.x=1", "spec.steps is not a section in the file, so it has no x"),
        ("steps..x=1", "'steps..x' names no field"),
    ],
)
def test_a_change_that_fits_nowhere_is_refused_with_its_cure(path, change, words):
    assert words in problem_of(path, change)


def minimal_run() -> VCPORun:
    return parse_run("""
        metadata: {name: r}
        spec: {model: {name: m}, environment: {name: countdown}, steps: 3}
    """)


def test_version_and_kind_may_be_left_out():
    run = minimal_run()
    assert (run.api_version, run.kind) == (API_VERSION, KIND) == ("vcpo.dev/v1alpha1", "VCPORun")


def test_the_default_algorithm_is_the_papers_with_three_departures():
    algorithm = minimal_run().spec.algorithm
    config = algorithm.loss_config
    assert algorithm.method is Method.VCPO2
    assert (config.baseline, config.baseline_scope) == (Baseline.PESSIMISTIC, BaselineScope.BATCH)
    assert config.learning_rate_rule is LearningRateRule.TRUST_REGION
    assert (config.weight, config.weight_cap) == (Weight.SEQUENCE, 8.0)
    assert config.aggregation is Aggregation.SEQUENCE_MEAN
    assert algorithm.on_policy_ess_ratio is None


def test_the_default_fleet_is_one_worker_of_one_group():
    (group,) = minimal_run().spec.rollouts
    assert (group.name, group.min_replicas, group.max_replicas) == ("main", 1, 1)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def fields(
    model: type[BaseModel] = VCPORunSpec, path: str = "spec"
) -> Iterator[tuple[str, str, FieldInfo]]:
    """Path, name and field of each value that a run file can set, and of sections with a text."""
    for name, field in model.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner or field.description:
            yield f"{path}.{name}", name, field
        for each in inner:
            yield from fields(each, f"{path}.{name}")


def text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def offenders(is_broken) -> list[str]:
    return sorted({path for path, name, field in fields() if is_broken(name, field)})


def test_a_field_without_a_default_value_says_what_unset_means():
    def is_broken(_: str, field: FieldInfo) -> bool:
        unset = field.default is None and not field.is_required()
        return unset and "if unset" not in text(field).lower()

    assert offenders(is_broken) == []


PAGE = rendered_page()
ROWS = re.findall(r"^\| `([\w.\[\]]+)` \| (.+?) \| (.+?) \| (.+) \|$", PAGE, flags=re.M)


def test_each_field_stands_once_with_its_text_and_the_twenty_come_first():
    paths = [path for path, *_ in ROWS]
    assert len(FIRST) == 20
    assert tuple(paths[:20]) == FIRST
    assert len(set(paths)) == len(paths)

    def in_file(path: str) -> str:
        return re.sub("_([a-z])", lambda each: each[1].upper(), path.removeprefix("spec."))

    texts = {path.replace("[]", ""): text for path, _, _, text in ROWS}
    assert texts == {
        in_file(path): " ".join((field.description or "").split()).replace("|", "\\|")
        for path, _, field in fields()
    }


def warnings(**fields):
    return algorithm_warnings(Algorithm.model_validate(fields))


def test_vcpo_as_it_is_needs_no_warning():
    assert warnings() == ()


QUIET = set(Method) - {Method.REINFORCE, Method.OPMD, Method.DAPO, Method.VTRACE}


@pytest.mark.parametrize("method", sorted(QUIET))
def test_a_method_with_its_own_settings_is_not_warned_about(method):
    assert warnings(method=method) == ()


@pytest.mark.parametrize("method", ["tba", "agro", "kimi"])
def test_the_rule_is_advised_against_beside_a_kl_penalty(method):
    (warning,) = warnings(method=method, learningRateRule="sqrt")
    assert "limits already" in warning


@pytest.mark.parametrize("method", ["gspo", "geometricMask"])
def test_the_rule_reads_another_ratio_than_a_geometric_method_uses(method):
    (warning,) = warnings(method=method, learningRateRule="sqrt")
    assert "geometric ratios" in warning


def test_the_rule_is_a_brake_only_where_the_gradient_holds_no_weights():
    (warning,) = warnings(method="topr", learningRateRule="linear")
    assert "'linear' reads importance weights" in warning


@pytest.mark.parametrize("method", ["grpo", "m2po", "bapo"])
def test_the_optimal_baseline_is_not_optimal_under_clipping(method):
    (warning,) = warnings(method=method, baseline="opob")
    assert "before the clipping" in warning


@pytest.mark.parametrize("method", ["reinforce", "opmd"])
def test_a_method_without_correction_is_warned_about_stale_data(method):
    (warning,) = warnings(method=method)
    assert "does not correct for stale data" in warning
    assert warnings(method=method, maxPolicyLagSteps=0) == ()


def test_a_filter_may_wait_for_ever():
    (warning,) = warnings(method="dapo")
    assert "no step is taken" in warning


def about_batch(lag=8, **fields):
    algorithm = Algorithm.model_validate({"maxPolicyLagSteps": lag})
    return list(batch_warnings(Batch.model_validate(fields), algorithm))


def test_without_lag_no_partial_response_can_be_resumed():
    (warning,) = about_batch(lag=0, overProvisionRatio=1.5)
    assert "`maxPolicyLagSteps` 0" in warning


def batch_warning(**fields):
    (warning,) = batch_warnings(Batch.model_validate(fields), Algorithm())
    return warning


def test_a_micro_batch_above_the_batch_is_said_to_change_nothing():
    warning = batch_warning(promptsPerStep=4, trajectoriesPerPrompt=4, microBatchTrajectories=17)
    assert warning.startswith(
        "microBatchTrajectories 17 is more than the 16 trajectories of a step"
    )


@pytest.mark.parametrize(
    ("lora", "engine", "precision", "count"),
    [
        ({}, "vllm", "float32", 1),
        ({}, "vllm", "bfloat16", 0),
        ({}, "hf", "float32", 0),
        (None, "vllm", "float32", 0),
    ],
)
def test_a_precision_in_which_vllm_serves_no_adapters_on_a_gpu_is_warned_about(
    lora, engine, precision, count
):
    model = Model.model_validate({"name": "m", "lora": lora})
    group = RolloutGroup.model_validate({"name": "main", "engine": engine, "precision": precision})
    found = list(rollout_warnings(model, [group]))
    assert len(found) == count
    assert all(line.startswith("main: precision 'float32'") for line in found)


SCHEMA = json_schema()
UNBOUNDED_BY_DESIGN = {
    # Pod templates are Kubernetes' own and checked there.
    "spec.learner.template",
    "spec.pods.template",
    "spec.rollouts[].template",
}


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    """The node with its reference followed; what stands beside the reference goes before."""
    name = node.get("$ref", "").removeprefix("#/$defs/")
    return {**SCHEMA["$defs"][name], **node} if name else node


def walk(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that a run may hold, by its path: `[]` is an item, `{}` a value of a map."""
    node = resolve(node)
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from walk(f"{path}.{name}" if path else name, inner)
    for inner in node.get("anyOf", []):
        yield from walk(path, inner)
    if "items" in node:
        yield from walk(f"{path}[]", node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(f"{path}{{}}", node["additionalProperties"])


def properties() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every property: its path, its name, its schema and the object that holds it."""
    for path, node in walk("", SCHEMA):
        for name, inner in node.get("properties", {}).items():
            yield f"{path}.{name}".strip("."), name, resolve(inner), node


def is_bounded(node: dict[str, Any]) -> bool:
    if {"const", "enum"} & node.keys():
        return True
    match node.get("type"):
        case "string":
            return "maxLength" in node
        case "array":
            return "maxItems" in node
        case "integer" | "number":
            lower = {"minimum", "exclusiveMinimum"} & node.keys()
            upper = {"maximum", "exclusiveMaximum"} & node.keys()
            return bool(lower and upper)
        case "object":
            return node.get("additionalProperties") is False or "maxProperties" in node
    return node.get("type") in {"boolean", "null"} or "anyOf" in node


def test_every_property_is_described():
    assert [path for path, _, node, _ in properties() if not node.get("description")] == []


def test_every_string_number_list_and_map_is_bounded():
    unbounded = {path for path, node in walk("", SCHEMA) if not is_bounded(node)}
    assert unbounded == UNBOUNDED_BY_DESIGN


def test_every_optional_property_has_a_default():
    missing = [
        path
        for path, name, node, owner in properties()
        if name not in owner.get("required", []) and "default" not in node
    ]
    assert missing == []


def test_every_object_of_ours_is_closed():
    owners = {id(owner): owner for _, _, _, owner in properties()}
    assert all(owner["additionalProperties"] is False for owner in owners.values())


def algorithm(**fields):
    return Algorithm.model_validate(fields)


def refusal(**fields):
    with pytest.raises(ValidationError) as caught:
        algorithm(**fields)
    (problem,) = problems_of(caught.value)
    return str(problem)


@pytest.mark.parametrize("method", list(Method))
def test_a_method_is_one_word(method):
    assert algorithm(method=method.value).loss_config == LOSS_CONFIGS[method]


def test_what_is_given_replaces_the_methods_own():
    config = algorithm(
        method="grpo", baseline="opob", settings={"clipHigh": 0.28}, learningRateRule="sqrt"
    ).loss_config
    assert (config.baseline, config.clip_low, config.clip_high) == (Baseline.OPOB, 0.2, 0.28)
    assert config.learning_rate_rule is LearningRateRule.SQRT
    assert config.clipping is Clipping.CLIP


def test_a_number_that_the_method_does_not_read_is_refused_with_those_that_it_does():
    assert refusal(method="cispo", settings={"klCoefficient": 0.1}) == (
        "settings.klCoefficient: method 'cispo' does not read it; remove it or use weightCap,"
        " weightFloor, overlongShare (got 0.1)"
    )
    assert refusal(settings={"clipHihg": 0.1}).startswith("settings.clipHihg: method 'vcpo2'")


def test_a_number_out_of_range_is_refused_with_the_range():
    assert refusal(method="grpo", settings={"clipLow": 1.5}) == (
        "settings.clipLow: must be from 0 to 1 (got 1.5)"
    )


@pytest.mark.parametrize("method", ["tba", "agro", "kimi", "vtrace"])
def test_a_method_with_a_fixed_baseline_refuses_another(method):
    assert "always uses" in refusal(method=method, baseline="opob")


def test_a_loss_of_the_users_own_takes_the_numbers_of_the_method():
    config = algorithm(
        method="grpo", loss="mine.losses:soft", settings={"clipHigh": 0.3}
    ).loss_config
    assert (config.loss, config.clip_high, config.is_shipped) == ("mine.losses:soft", 0.3, False)


@pytest.mark.parametrize("path", ["soft", "mine:", ":soft", "mine.1:soft", "mine:soft()"])
def test_a_loss_is_named_by_module_and_function(path):
    assert refusal(loss=path) == (
        "loss: must be package.module:function; remove it for the loss of the method"
        f" (got {path!r})"
    )


def test_a_baseline_of_the_users_own_spans_the_group_or_the_batch():
    assert algorithm(baseline="mine:b").loss_config.baseline_scope is BaselineScope.GROUP
    config = algorithm(baseline="mine:b", baselineScope="batch")
    assert config.loss_config.baseline_scope is BaselineScope.BATCH


def test_limits_of_a_step_come_from_the_spec():
    assert algorithm(refuseBelow=0.1).step_limits.refuse_below == 0.1


def test_the_trust_region_has_the_horizon_of_the_largest_lag_and_the_target_of_the_spec():
    region = algorithm(
        learningRateRule="trustRegion", maxPolicyLagSteps=48, targetEssRatio=0.6
    ).trust_region
    assert region is not None
    assert (region.horizon_steps, region.target_ess_ratio) == (48, 0.6)
    assert algorithm(learningRateRule="sqrt").trust_region is None


def test_only_the_rule_of_the_region_damps_below_a_target():
    fields = {"learningRateRule": "trustRegion", "targetEssRatio": 0.5}
    assert algorithm(**fields).step_limits.target_ess_ratio == 0.5
    assert algorithm(learningRateRule="sqrt").step_limits.target_ess_ratio == 1.0


def test_a_target_is_refused_under_a_rule_that_has_none():
    assert refusal(learningRateRule="sqrt", targetEssRatio=0.5) == (
        "targetEssRatio: rule 'sqrt' does not use it; use learningRateRule 'trustRegion' (got 0.5)"
    )


HEAD = "metadata: {name: r}\nspec:\n  model: {name: m}\n  environment: {name: countdown}\n"


def problems(spec: str) -> dict[str, str]:
    """Every problem of a run with these lines in its `spec`: path -> the rest of its line."""
    with pytest.raises(SpecError) as refused:
        parse_run(HEAD + indent(spec, "  "))
    return {problem.path: str(problem).partition(": ")[2] for problem in refused.value.problems}


def test_a_missing_field_is_named():
    assert problems("seed: 1") == {"spec.steps": "required field is missing"}


@pytest.mark.parametrize(
    ("field", "fix"),
    [
        ("stepz", "did you mean spec.steps?"),
        ("learning_rate", "did you mean spec.optimizer.learningRate?"),
        ("lr", "did you mean spec.optimizer.learningRate?"),
        ("num_generations", "did you mean spec.batch.trajectoriesPerPrompt?"),
        ("max_completion_length", "did you mean spec.sampling.maxNewTokens?"),
        ("maxPolicyLagStep", "did you mean spec.algorithm.maxPolicyLagSteps?"),
        ("anything", "remove it or correct its spelling"),
    ],
)
def test_an_unknown_field_says_which_one_may_be_meant(field, fix):
    assert problems(f"steps: 3\n{field}: 5") == {f"spec.{field}": f"unknown field; {fix} (got 5)"}


def test_the_names_of_other_trainers_stand_for_fields_that_there_are():
    known = {*_fields(), *(path.partition("[")[0] for path in _fields())}
    assert {f"spec.{field}" for field in _ELSEWHERE} <= known


def test_a_misspelled_value_and_another_kind_of_value_say_what_is_right():
    found = problems("steps: 3\nalgorithm: {method: gpro}\nbatch: 3\nrollouts: {name: a}")
    assert found["spec.algorithm.method"].startswith("did you mean gspo or grpo? It must be one")
    assert found["spec.batch"] == "must be a section (got 3)"
    assert found["spec.rollouts"] == "must be a list (got {'name': 'a'})"


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


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/../b", "..", "a/", ".hidden"])
def test_a_revision_names_no_path_out_of_the_cache(revision):
    with pytest.raises(ValidationError, match="revision"):
        Model(name="a/b", revision=revision)
    assert Model(name="a/b", revision="refs/pr/1.0.2-rc").revision


def test_all_problems_come_together():
    found = problems("""
seed: -1
algorithm: {maxPolicyLagSteps: -1, lag: 3}
optimizer: {learningRate: fast, betas: [1.0, 0.9]}
rollouts: [{name: a, maxReplicas: 0}, {name: B}]
""")
    assert sorted(found) == [
        "spec.algorithm.lag",
        "spec.algorithm.maxPolicyLagSteps",
        "spec.optimizer.betas[0]",
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
