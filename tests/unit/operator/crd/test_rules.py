"""The CEL rules give the verdict that `vcpo.api` gives, run by an independent CEL library."""

from collections.abc import Iterator, Mapping
from typing import Any

import cel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.fakes.kubernetes.objects.schema import Schema
from tests.fixtures.broken_specs import BROKEN_SPECS
from tests.fixtures.operator.runs import document
from tests.fixtures.operator.stored_runs import SCHEMA, stored_run
from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.methods import Method
from vcpo.api import VCPORun


def complaints(
    schema: Mapping[str, Any], value: Any, old: Any = None, *, updating: bool = False
) -> Iterator[str]:
    """Messages of all broken rules, at every depth, as the API server shows them."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and not updating:
            continue
        values = {"self": value, "oldSelf": old}
        if not cel.evaluate(rule["rule"], values):
            told = rule.get("messageExpression")
            yield rule["message"] if told is None else cel.evaluate(told, values)
    for name, field in schema.get("properties", {}).items():
        if isinstance(value, Mapping) and name in value:
            yield from complaints(field, value[name])
    if isinstance(value, list):
        for item in value:
            yield from complaints(schema["items"], item)


def problems(**spec: Any) -> list[str]:
    return list(complaints(SCHEMA, stored_run(spec)))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    schema = SCHEMA["properties"]["spec"]
    old, new = stored_run(before)["spec"], stored_run(after)["spec"]
    return list(complaints(schema, new, old, updating=True))


def test_a_run_of_defaults_breaks_no_rule():
    assert problems() == []


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        *((spec, word) for spec, _, word in BROKEN_SPECS),
        ({"model": {"name": "./models/tiny"}}, "absolute path"),
    ],
)
def test_a_broken_rule_names_its_field(spec: dict[str, Any], word: str):
    (complaint,) = problems(**spec)
    assert word in complaint


def test_an_edit_that_is_refused_says_the_old_value_and_the_cure():
    (name,) = changes({}, {"model": {"name": "other"}})
    assert name == (
        "`model.name` is immutable, since a checkpoint fits no other; create another run; it is 'm'"
    )
    (queue,) = changes({}, {"pods": {"queueName": "gpus"}})
    assert queue.endswith("create another run; it is not set")


def every_rule(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each node of a schema with each of its rules."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield schema, rule
    for child in schema.get("properties", {}).values():
        yield from every_rule(child)
    if "items" in schema:
        yield from every_rule(schema["items"])


def test_no_message_has_a_part_whose_cost_the_api_server_takes_for_infinite():
    # https://github.com/kubernetes/kubernetes/issues/124234: the definition would be refused.
    told = [rule.get("messageExpression", "") for _, rule in every_rule(SCHEMA)]
    assert any(told)
    assert [each for each in told if "string(" in each or "[0]" in each or "filter" in each] == []


def test_each_path_of_a_rule_leads_to_a_field():
    for node, rule in every_rule(SCHEMA):
        field = node
        for name in rule.get("fieldPath", "").split(".")[1:]:
            field = field["properties"][name]


@pytest.mark.parametrize(
    "spec",
    [
        {"optimizer": {"schedule": "linear", "warmupSteps": 399}, "steps": 400},
        {"optimizer": {"name": "muon"}, "learner": {"gpusPerReplica": 1}},
        {"rollouts": [{"name": "a", "kvCacheGibibytes": 2.0, "engine": "vllm"}]},
        {"rollouts": [{"name": "a", "tensorParallelSize": 2, "kvCacheGibibytes": 2.0}]},
        {"rollouts": [{"name": "a", "engine": "pkg.own:Engine", "tensorParallelSize": 2}]},
        {
            "rollouts": [
                {
                    "name": "a",
                    "engine": "vllm",
                    "tensorParallelSize": 2,
                    "maxModelLen": 1025,
                    "engineArguments": {"block_size": 32},
                }
            ]
        },
        {"learner": {"processes": 8, "gpusPerReplica": 8, "replicas": 2, "fsdpSize": 16}},
        {"environment": {"name": "tasks.chess:Chess"}},
        {"tracking": {"sinks": [{"name": "wandb", "mode": "offline", "entity": "me"}]}},
        {"tracking": {"sinks": [{"name": "own.sinks:Csv", "parameters": {"folder": "/logs"}}]}},
        {"pods": {"extraEgress": [{"port": 443}, {"port": 5000, "namespace": "obs"}]}},
        {"environment": {"name": "verifiers:wordle"}},
        {"model": {"name": "/models/tiny"}},
        {"model": {"name": "Qwen/Qwen2.5-1.5B"}},
        {"model": {"name": "s3://bucket/models/qwen"}},
    ],
)
def test_what_a_cluster_can_have_breaks_no_rule(spec: dict[str, Any]):
    assert problems(**spec) == []


@pytest.mark.parametrize(
    ("name", "refused"), [("a" * 41, 1), ("a" * 40, 0), ("qwen2.5-run", 0), ("7b", 0)]
)
def test_a_name_may_have_dots_and_digits_but_not_more_than_40_characters(name: str, refused: int):
    body = {**stored_run({}), "metadata": {"name": name}}
    causes = Schema(SCHEMA).violations(body, None)
    assert [each.field for each in causes] == ["metadata.name"] * refused


def test_a_group_with_too_few_places_is_named():
    groups = [{"name": "a"}, {"name": "b", "maxConcurrentSequences": 4, "maxModelLen": 8}]
    size = {"trajectoriesPerPrompt": 8}
    (places, length) = problems(rollouts=groups, batch=size)
    assert places == (
        "`rollouts[1].maxConcurrentSequences` must be at least `batch.trajectoriesPerPrompt`"
    )
    assert length == "`rollouts[1].maxModelLen` must be more than `sampling.maxNewTokens`"


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ({"model": {"name": "other"}}, "`model.name`"),
        ({"model": {"name": "m", "revision": "v2"}}, "`model.revision`"),
        ({"environment": {"name": "sort_digits"}}, "`environment.name`"),
        ({"seed": 1}, "`seed`"),
        ({"batch": {"promptsPerStep": 8}}, "`batch.promptsPerStep`"),
        ({"optimizer": {"learningRate": 1e-5}}, "`optimizer`"),
        ({"pods": {"queueName": "gpus"}}, "`pods.queueName`"),
        ({"learner": {"checkpointStorageClassName": "fast"}}, "ClassName`"),
        ({"learner": {"replicas": 2}}, "`learner.replicas`"),
    ],
)
def test_what_a_checkpoint_depends_on_may_not_change(after: dict[str, Any], field: str):
    (complaint,) = changes({}, after)
    assert field in complaint


@pytest.mark.parametrize(
    "after",
    [
        {"steps": 99},
        {"suspend": True},
        {"rollouts": [{"name": "main", "maxReplicas": 9}]},
        {"learner": {"checkpointStorageGibibytes": 60}},
        {"control": {"essFloorRatio": 0.2}},
        {"batch": {"promptPool": 100, "promptSelection": "teacher"}},
    ],
)
def test_what_steers_a_run_may_change(after: dict[str, Any]):
    assert changes({}, after) == []


def test_a_learner_of_several_pods_may_get_another_number_of_ranks():
    before = {"learner": {"replicas": 4, "gpusPerReplica": 8, "fsdpSize": 8}}
    assert changes(before, {"learner": {"replicas": 2, "gpusPerReplica": 4}}) == []


@pytest.mark.parametrize("baseline", [None, "opob", "mine:b"])
@pytest.mark.parametrize("scope", [None, "group", "batch"])
@pytest.mark.parametrize("method", list(Method))
def test_rules_and_model_agree_about_one_pass(method, scope, baseline):
    fields = {"method": method.value, "baselineScope": scope, "baseline": baseline}
    algorithm = {name: value for name, value in fields.items() if value is not None}
    spec = {"algorithm": algorithm, "learner": {"gradientMode": "onePass"}}
    assert not accepts({"algorithm": algorithm}) or (problems(**spec) == []) == accepts(spec)


@given(
    processes=st.sampled_from([None, 1, 2, 3]),
    gpus=st.sampled_from([None, 1, 2, 3]),
    replicas=st.sampled_from([1, 2, 3]),
    fsdp_size=st.sampled_from([None, 1, 2, 3, 4, 6]),
)
def test_rules_and_model_agree_about_ranks(processes, gpus, replicas, fsdp_size):
    given_fields = {"processes": processes, "gpusPerReplica": gpus, "fsdpSize": fsdp_size}
    learner = {name: value for name, value in given_fields.items() if value is not None}
    spec = {"learner": {"replicas": replicas, **learner}}
    assert (problems(**spec) == []) == accepts(spec)


@given(
    baseline=st.sampled_from([None, "mine:b", *Baseline]),
    method=st.sampled_from(["vcpo", "vcpo2", "reinforce", "grpo", "rloo", "sequenceTis"]),
    scope=st.sampled_from([None, *BaselineScope]),
    size=st.integers(1, 4),
    prompts=st.integers(1, 2),
    places=st.integers(1, 4),
    bounds=st.tuples(st.integers(0, 3), st.integers(1, 3)),
)
def test_rules_and_model_agree(baseline, method, scope, size, prompts, places, bounds):
    spec = {
        "algorithm": {"method": method}
        | ({} if scope is None else {"baselineScope": scope})
        | ({} if baseline is None else {"baseline": baseline}),
        "batch": {"trajectoriesPerPrompt": size, "promptsPerStep": prompts},
        "rollouts": [
            {
                "name": "main",
                "maxConcurrentSequences": places,
                "minReplicas": bounds[0],
                "maxReplicas": bounds[1],
            }
        ],
    }
    assert (problems(**spec) == []) == accepts(spec)


def accepts(spec: dict[str, Any]) -> bool:
    try:
        VCPORun.model_validate(document(**spec))
    except ValidationError:
        return False
    return True
