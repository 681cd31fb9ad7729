"""The operator adopts no object of others, and reuses the claims of earlier runs."""

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Fault
from tests.fixtures.operator.operator import KEY, RUN, USER_AGENT, operator_fixture, signals

CONFIG_MAPS = f"/api/v1/namespaces/{KEY.namespace}/configmaps"
SERVICES = f"/api/v1/namespaces/{KEY.namespace}/services"
CLAIMS = f"/api/v1/namespaces/{KEY.namespace}/persistentvolumeclaims"
STATEFUL_SETS = f"/apis/apps/v1/namespaces/{KEY.namespace}/statefulsets"
THEIRS = {"metadata": {"name": "demo-config"}, "data": {"ours": "keep"}}


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def condition(operator, kind):
    conditions = (await operator.run())["status"]["conditions"]
    (found,) = (each for each in conditions if each["type"] == kind)
    return found["status"], found["reason"], found["message"]


async def pods(operator):
    listed = await operator.client.get(f"/api/v1/namespaces/{KEY.namespace}/pods")
    return [each["metadata"]["name"] for each in listed["items"]]


async def test_an_object_that_is_nobodys_is_left_as_it_is_and_the_run_says_so(operator):
    before = await operator.client.create(CONFIG_MAPS, THEIRS)
    await operator.create()
    await operator.settle()
    status, reason, message = await condition(operator, "Ready")
    assert (status, reason) == ("False", "NameTaken")
    assert "kubectl annotate configmap demo-config vcpo.dev/adopt=true" in message
    assert await operator.client.get(f"{CONFIG_MAPS}/demo-config") == before
    assert await pods(operator) == []


async def test_it_is_taken_over_once_its_owner_says_so(operator):
    await operator.client.create(CONFIG_MAPS, THEIRS)
    await operator.create()
    await operator.settle()
    given = {"metadata": {"annotations": {"vcpo.dev/adopt": "true"}}}
    await operator.client.merge_patch(f"{CONFIG_MAPS}/demo-config", given)
    await operator.settle()
    taken = await operator.client.get(f"{CONFIG_MAPS}/demo-config")
    run = await operator.run()
    assert [each["uid"] for each in taken["metadata"]["ownerReferences"]] == [
        run["metadata"]["uid"]
    ]
    assert {"run.yaml", "ours"} <= set(taken["data"])
    assert (await condition(operator, "Ready"))[1] == "Initializing"


async def test_the_run_goes_on_once_it_is_deleted(operator):
    await operator.client.create(CONFIG_MAPS, THEIRS)
    await operator.create()
    await operator.settle()
    await operator.client.delete(f"{CONFIG_MAPS}/demo-config")
    await operator.settle()
    assert (await condition(operator, "Ready"))[1] == "Initializing"
    assert "demo-learner-0" in await pods(operator)


async def test_an_object_that_only_carries_the_runs_label_is_not_taken_either(operator):
    labels = {"vcpo.dev/run": "demo"}
    spec = {"ports": [{"port": 1}], "selector": {"mine": "yes"}}
    body = {"metadata": {"name": "demo-learner", "labels": labels}, "spec": spec}
    before = await operator.client.create(SERVICES, body)
    await operator.create()
    await operator.settle()
    assert (await condition(operator, "Ready"))[1] == "NameTaken"
    assert await operator.client.get(f"{SERVICES}/demo-learner") == before


async def kept_claim(operator, **learner):
    """The claim that an earlier run of the name left, bound to its volume."""
    await operator.create(learner=learner)
    await operator.settle()
    await operator.client.merge_patch(
        f"{CLAIMS}/demo-learner/status", {"status": {"phase": "Bound"}}
    )
    await operator.client.delete(RUN)
    await operator.backend.wait_until_settled()
    operator.restart_operator()
    return await operator.client.get(f"{CLAIMS}/demo-learner")


async def test_a_claim_kept_by_an_earlier_run_serves_the_next_one_if_it_is_large_enough(operator):
    await kept_claim(operator, checkpointStorageGibibytes=100)
    await operator.create(learner={"checkpointStorageGibibytes": 50})
    await operator.settle()
    claim = await operator.client.get(f"{CLAIMS}/demo-learner")
    assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"
    assert "has 100Gi and is used as it is" in (await condition(operator, "Accepted"))[2]
    assert (await condition(operator, "Ready"))[1] == "Initializing"
    assert "demo-learner-0" in await pods(operator)


async def test_a_claim_that_is_too_small_grows(operator):
    await kept_claim(operator, checkpointStorageGibibytes=10)
    await operator.create(learner={"checkpointStorageGibibytes": 50})
    await operator.settle()
    claim = await operator.client.get(f"{CLAIMS}/demo-learner")
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert (await condition(operator, "Accepted"))[2] == "The spec is valid."


async def test_a_claim_of_another_storage_class_is_named_with_the_cure(operator):
    kept = await kept_claim(operator, checkpointStorageClassName="slow")
    await operator.create(learner={"checkpointStorageClassName": "fast.ssd"})
    await operator.settle()
    status, reason, message = await condition(operator, "Ready")
    assert (status, reason) == ("False", "ClaimMismatch")
    assert "kubectl delete pvc demo-learner" in message
    assert await operator.client.get(f"{CLAIMS}/demo-learner") == kept
    assert await pods(operator) == []


async def bind_claim(operator):
    """Give the run's claim its volume, as the control plane does."""
    bound = {"status": {"phase": "Bound"}}
    await operator.client.merge_patch(f"{CLAIMS}/demo-learner/status", bound)


def no_growth():
    """What a server answers where a claim's storage class does not let it expand."""
    why = (
        "only dynamically provisioned pvc can be resized and the storageclass that provisions the"
        " pvc must support resize"
    )
    error = forbidden("persistentvolumeclaims", "demo-learner", why)
    claims = "persistentvolumeclaims"
    return Fault(error=error, verb="patch", resource=claims, user_agent=USER_AGENT, times=None)


async def test_a_growth_that_the_storage_class_forbids_holds_up_nothing_else():
    async with operator_fixture() as operator:
        await operator.create(learner={"checkpointStorageGibibytes": 10})
        await operator.settle()
        await bind_claim(operator)
        await operator.settle()
        operator.connections.signals = signals()
        await operator.settle()
        operator.server.faults.add(no_growth())
        two = [{"name": "main", "minReplicas": 2, "maxReplicas": 3}]
        await operator.edit(learner={"checkpointStorageGibibytes": 50}, rollouts=two)
        assert not (await operator.reconcile()).error
        assert await operator.replicas() == 2
        status, reason, message = await condition(operator, "Accepted")
        assert (status, reason) == ("False", "InvalidSpec")
        assert "must support resize" in message
        assert "kubectl delete pvc demo-learner" in message
        assert "Set `learner.checkpointStorageGibibytes` back to its old value" in message


async def test_a_growth_that_is_refused_can_be_taken_back():
    async with operator_fixture() as operator:
        await operator.create(learner={"checkpointStorageGibibytes": 10})
        await operator.settle()
        await bind_claim(operator)
        await operator.settle()
        operator.server.faults.add(no_growth())
        await operator.edit(learner={"checkpointStorageGibibytes": 50})
        await operator.reconcile()
        await operator.edit(learner={"checkpointStorageGibibytes": 10})
        assert not (await operator.reconcile()).error
        assert (await condition(operator, "Accepted"))[:2] == ("True", "Accepted")
