"""The chart's admission policy warns where `vcpo validate` does, by an independent CEL library."""

from __future__ import annotations

import functools
import itertools

import cel
import pytest

from tests.fixtures.chart.rendering import of_kind, only
from tests.fixtures.operator.stored_runs import stored_run
from vcpo.api import VCPORun, missing_gpus

POLICY = only("ValidatingAdmissionPolicy")["spec"]


def asking(container, **resources):
    """A template whose container has resources."""
    return {"template": {"spec": {"containers": [{"name": container, "resources": resources}]}}}


LEARNERS = [
    {},
    {"gpusPerReplica": 2},
    {"precision": "bfloat16"},
    asking("learner", limits={"amd.com/gpu": 1}),
    asking("learner", requests={"cpu": 4, "rdma/hca": 1}),
    asking("other", limits={"nvidia.com/gpu": 1}),
    {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}},
]
GROUPS = [
    {},
    {"engine": "vllm"},
    {"engine": "vllm", "gpus": 0},
    {"gpus": 0, "tensorParallelSize": 2, "engine": "vllm"},
    {"gpus": 0, "engineArguments": {"enforce_eager": True}},
    {"gpus": 0, "kvCache": "keep"},
    {"gpus": 0, "kvCacheGibibytes": 2.0},
    {"engine": "my.engine:Engine"},
    {"gpus": 1},
    {"precision": "bfloat16"},
    asking("rollout", claims=[{"name": "gpu"}]),
    {"gpus": 0, **asking("rollout", limits={"nvidia.com/mig-1g.10gb": 1})},
]
MODELS = [{}, {"sizeBillions": 7}]
PODS = [{}, asking("rollout", limits={"nvidia.com/gpu": 1}), asking("learner", claims=[{}])]


@functools.cache
def program(expression):
    return cel.compile(expression)


def warnings(body):
    """Messages of the policy about a run, as the API server shows them."""
    known = {"object": body, "variables": {}}
    for variable in POLICY["variables"]:
        known["variables"][variable["name"]] = program(variable["expression"]).execute(known)
    for rule in POLICY["validations"]:
        if not program(rule["expression"]).execute(known):
            told = rule.get("messageExpression")
            yield rule["message"] if told is None else program(told).execute(known)


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_api_server_warns_where_the_operator_does(learner):
    for group, model, pods in itertools.product(GROUPS, MODELS, PODS):
        groups = [{"name": "main", **group}, {"name": "other", "engine": "hf", "gpus": 0}]
        spec = {"model": {"name": "m", **model}, "learner": learner, "pods": pods}
        body = stored_run({**spec, "rollouts": groups})
        expected = [
            each.partition("ask")[0].split()[-1].strip("'")
            for each in missing_gpus(VCPORun.model_validate(body).spec)
        ]
        told = ["learner" if "learner" in each else each.split("'")[1] for each in warnings(body)]
        most = 2 if "learner" in expected else 1  # it names the first group
        assert told == expected[:most], (group, model, pods)


def test_the_warning_of_a_group_names_it_and_the_cure():
    group = {"name": "fast", "engine": "vllm", "gpus": 0}
    (told,) = warnings(stored_run({"rollouts": [group]}))
    assert told == (
        "the workers of group 'fast' ask for no GPU and seem to need one: set `gpus` of the group"
        " in `spec.rollouts`"
    )


def test_a_run_that_the_policy_cannot_judge_is_admitted_and_none_is_refused():
    (binding,) = of_kind("ValidatingAdmissionPolicyBinding")
    assert POLICY["failurePolicy"] == "Ignore"
    assert binding["spec"]["validationActions"] == ["Warn", "Audit"]
    assert binding["spec"]["policyName"] == only("ValidatingAdmissionPolicy")["metadata"]["name"]


def test_without_cluster_wide_rights_there_is_no_policy():
    assert of_kind("ValidatingAdmissionPolicy", {"crds": {"enabled": False}}) == []
