"""The operator reports a spec that the API server refuses once, and retries it rarely."""

import pytest

from tests.fixtures.operator.operator import (
    DEPLOYMENT,
    PODS,
    USER_AGENT,
    operator_fixture,
    run_body,
)
from vcpo_operator.reconcile.memory import REFUSED_S

EVENTS = "/api/v1/namespaces/default/events"
STATEFUL_SET = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"
SENTENCE = 'spec.template.spec.containers[0].volumeMounts[3].name: Not found: "absent"'
MOUNT = {"name": "absent", "mountPath": "/data"}


def template(container, mounts):
    """A user's part of a pod template."""
    return {"spec": {"containers": [{"name": container, "volumeMounts": mounts}]}}


def group(mounts):
    """The run's group with mounts in its template."""
    return {**run_body()["spec"]["rollouts"][0], "template": template("rollout", mounts)}


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def condition(operator, kind):
    """Status, reason and message of a condition of the run."""
    conditions = (await operator.run())["status"]["conditions"]
    (found,) = [each for each in conditions if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


async def warnings(operator):
    """Reasons and messages of the Warnings about the run."""
    events = (await operator.client.get(EVENTS))["items"]
    return [
        (event["reason"], event["message"])
        for event in events
        if event["type"] == "Warning" and event["involvedObject"]["kind"] == "VCPORun"
    ]


async def test_a_template_that_the_server_refuses_is_not_accepted_and_warned_of_once(operator):
    before = await warnings(operator)
    await operator.create(rollouts=[group([MOUNT])])
    await operator.settle()
    status, reason, message = await condition(operator, "Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert SENTENCE in message
    assert await condition(operator, "Ready") == ("False", "InvalidSpec", message)
    operator.restart_operator()
    await operator.settle()
    new = [each for each in await warnings(operator) if each not in before]
    assert new == [("InvalidSpec", f"Accepted: {message}")]


BAD_SHAPES = [
    ({"spec": None}, "spec"),
    ({"spec": {"containers": None}}, "spec.containers"),
    ({"metadata": {"labels": ["a"]}}, "metadata.labels"),
    ({"metadata": {"annotations": "a"}}, "metadata.annotations"),
]
BAD_RESOURCES = [("big", ""), ({"limits": ["1Gi"]}, ".limits"), ({"requests": "1Gi"}, ".requests")]


@pytest.mark.parametrize(("shape", "path"), BAD_SHAPES)
@pytest.mark.parametrize("role", ["learner", "rollout"])
async def test_a_template_of_a_wrong_shape_is_not_accepted_and_told_by_its_path(role, shape, path):
    await assert_not_accepted(role, shape, path)


@pytest.mark.parametrize(("resources", "path"), BAD_RESOURCES)
@pytest.mark.parametrize("role", ["learner", "rollout"])
async def test_resources_of_a_wrong_shape_are_not_accepted_and_told_by_their_path(
    role, resources, path
):
    shape = {"spec": {"containers": [{"name": role, "resources": resources}]}}
    await assert_not_accepted(role, shape, f"spec.containers[{role}].resources{path}")


async def assert_not_accepted(role, shape, path):
    """A run with this template is refused, and the field that is at fault is named."""
    workers = {**run_body()["spec"]["rollouts"][0], "template": shape}
    spec = {"learner": {"template": shape}} if role == "learner" else {"rollouts": [workers]}
    async with operator_fixture() as operator:
        await operator.create(**spec)
        await operator.reconcile()
        status, reason, message = await condition(operator, "Accepted")
        assert (status, reason) == ("False", "InvalidSpec")
        section = "learner" if role == "learner" else "rollouts[main]"
        assert message.startswith(f"spec.{section}.template: `{path}` ")
        told = [reason for reason, _ in await warnings(operator)]
        assert told == ["InvalidSpec"]


async def test_a_quantity_that_is_none_is_not_accepted_and_no_trouble(operator):
    memory = {"name": "learner", "resources": {"limits": {"memory": "16GB"}}}
    await operator.create(learner={"template": {"spec": {"containers": [memory]}}})
    outcome = await operator.reconcile()
    assert not outcome.error
    status, reason, message = await condition(operator, "Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert "`spec.containers[learner].resources.limits[memory]` is '16GB'" in message
    assert await condition(operator, "Ready") == ("False", "InvalidSpec", message)


async def test_what_runs_goes_on_beside_a_template_that_is_refused(operator):
    await operator.create()
    await operator.settle()
    old = (await operator.client.get(DEPLOYMENT))["spec"]["template"]
    await operator.edit(rollouts=[group([MOUNT])])
    outcome = await operator.reconcile()
    assert not outcome.error
    assert (await operator.client.get(DEPLOYMENT))["spec"]["template"] == old
    assert (await operator.client.get(PODS))["items"]


async def test_a_template_that_was_put_right_is_applied(operator):
    await operator.create(rollouts=[group([MOUNT])])
    await operator.settle()
    await operator.edit(rollouts=[group([])])
    await operator.settle()
    assert (await condition(operator, "Accepted"))[:2] == ("True", "Accepted")
    assert await operator.replicas() == 1


async def test_no_worker_waits_for_a_learner_that_is_refused(operator):
    await operator.create(learner={"template": template("learner", [MOUNT])})
    await operator.settle()
    assert (await condition(operator, "Accepted"))[:2] == ("False", "InvalidSpec")
    assert (await operator.client.get(PODS))["items"] == []


async def test_what_was_refused_is_tried_again_every_few_minutes_only():
    async with operator_fixture() as operator:
        await operator.create(rollouts=[{**group([MOUNT]), "minReplicas": 2}])
        await operator.settle()
        start_s = operator.now_s
        while operator.now_s < start_s + 2 * REFUSED_S:
            operator.now_s += 10.0
            await operator.reconcile()
        asked = [
            each for each in operator.server.recorder.writes() if each.user_agent == USER_AGENT
        ]
        tries = [each for each in asked if each.resource.startswith("deployments")]
        assert len(tries) == 3
