"""What the API server refuses, and what belongs to others, is reported once and left alone."""

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Fault
from tests.fixtures.operator.operator import (
    DEPLOYMENT,
    USER_AGENT,
    operator_fixture,
    run_body,
    signals,
)
from vcpo_operator.reconcile.memory import REFUSED_S

CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
CLAIM = "/api/v1/namespaces/default/persistentvolumeclaims/demo-learner"
SENTENCE = 'spec.template.spec.containers[0].volumeMounts[3].name: Not found: "absent"'
MOUNT = {"name": "absent", "mountPath": "/data"}
THEIRS = {"metadata": {"name": "demo-config"}, "data": {"ours": "keep"}}


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


async def test_a_template_that_the_server_refuses_is_not_accepted_and_warned_of_once(operator):
    await operator.create(rollouts=[group([MOUNT])])
    await operator.settle()
    status, reason, message = await operator.condition("Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert SENTENCE in message
    assert await operator.condition("Ready") == ("False", "InvalidSpec", message)
    operator.restart_operator()
    await operator.settle()
    told = [each["message"] for each in await operator.events() if each["reason"] == reason]
    assert told == [f"Accepted: {message}"]


async def test_what_runs_goes_on_beside_a_template_that_is_refused_until_it_is_put_right(operator):
    await operator.create()
    await operator.settle()
    old = (await operator.client.get(DEPLOYMENT))["spec"]["template"]
    await operator.edit(rollouts=[group([MOUNT])])
    outcome = await operator.reconcile()
    assert not outcome.error
    assert (await operator.client.get(DEPLOYMENT))["spec"]["template"] == old
    assert await operator.pods()
    await operator.edit(rollouts=[group([])])
    await operator.settle()
    assert (await operator.condition("Accepted"))[:2] == ("True", "Accepted")


async def test_what_was_refused_is_tried_again_every_few_minutes_only():
    async with operator_fixture() as operator:
        await operator.create(rollouts=[group([MOUNT])])
        await operator.settle()
        start_s = operator.now_s
        while operator.now_s < start_s + 2 * REFUSED_S:
            operator.now_s += 10.0
            await operator.reconcile()
        writes = operator.server.recorder.writes()
        asked = [each for each in writes if each.user_agent == USER_AGENT]
        assert len([each for each in asked if each.resource == "deployments"]) == 3


async def test_an_object_that_is_nobodys_is_left_as_it_is_until_its_owner_gives_it(operator):
    before = await operator.client.create(CONFIG_MAPS, THEIRS)
    await operator.create()
    await operator.settle()
    status, reason, message = await operator.condition("Ready")
    assert (status, reason) == ("False", "NameTaken")
    assert "kubectl annotate configmap demo-config vcpo.dev/adopt=true" in message
    assert await operator.client.get(f"{CONFIG_MAPS}/demo-config") == before
    assert await operator.pods() == {}
    given = {"metadata": {"annotations": {"vcpo.dev/adopt": "true"}}}
    await operator.client.merge_patch(f"{CONFIG_MAPS}/demo-config", given)
    await operator.settle()
    taken, run = await operator.client.get(f"{CONFIG_MAPS}/demo-config"), await operator.run()
    owners = [each["uid"] for each in taken["metadata"]["ownerReferences"]]
    assert owners == [run["metadata"]["uid"]]
    assert {"run.yaml", "ours"} <= set(taken["data"])
    assert (await operator.condition("Ready"))[1] == "Initializing"


async def test_a_growth_that_the_storage_class_forbids_holds_up_nothing_else():
    why = "only dynamically provisioned pvc can be resized"
    error = forbidden("persistentvolumeclaims", "demo-learner", why)
    claims = "persistentvolumeclaims"
    async with operator_fixture() as operator:
        await operator.create(learner={"checkpointStorageGibibytes": 10})
        await operator.settle()
        await operator.client.merge_patch(f"{CLAIM}/status", {"status": {"phase": "Bound"}})
        await operator.settle()
        operator.connections.signals = signals()
        await operator.settle()
        operator.server.faults.add(
            Fault(error=error, verb="patch", resource=claims, user_agent=USER_AGENT, times=None)
        )
        two = [{"name": "main", "minReplicas": 2, "maxReplicas": 3}]
        await operator.edit(learner={"checkpointStorageGibibytes": 50}, rollouts=two)
        assert not (await operator.reconcile()).error
        assert await operator.replicas() == 2
        status, reason, message = await operator.condition("Accepted")
        assert (status, reason) == ("False", "InvalidSpec")
        assert why in message
        await operator.edit(learner={"checkpointStorageGibibytes": 10})
        assert not (await operator.reconcile()).error
        assert (await operator.condition("Accepted"))[:2] == ("True", "Accepted")
