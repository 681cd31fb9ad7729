"""Keys for each run: made by the operator, one shown to one learner, replaced when deleted."""

import base64
import json
import time
from contextlib import AsyncExitStack

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Fault
from tests.fixtures.operator.operator import (
    DEPLOYMENT,
    KEY,
    ON_THE_FAKE,
    RUNS,
    USER_AGENT,
    run_body,
)
from tests.fixtures.signals import signals_message
from vcpo.wire.access.roles import AUTHORIZATION, RUN_ROLES, CallerRole
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2_grpc, work_pb2
from vcpo_operator.signals.client import LearnerConnections

NAMESPACE = f"/api/v1/namespaces/{KEY.namespace}"
SECRET = f"{NAMESPACE}/secrets/demo-keys"
PERIOD_S = 300.0


def keys_of(secret):
    return {role: base64.b64decode(secret["data"][role]).decode() for role in RUN_ROLES}


def steering_key_of(secret):
    return keys_of(secret)[CallerRole.STEERING]


async def condition(operator, kind):
    conditions = (await operator.run())["status"]["conditions"]
    (found,) = (each for each in conditions if each["type"] == kind)
    return found["reason"], found["message"]


async def environment(operator):
    deployment = await operator.client.get(DEPLOYMENT)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("valueFrom") for each in container["env"]}


async def template_hash(operator):
    deployment = await operator.client.get(DEPLOYMENT)
    return deployment["spec"]["template"]["metadata"]["annotations"]["vcpo.dev/template-hash"]


async def test_a_run_gets_a_secret_of_its_own_that_its_pods_read(operator):
    await operator.create()
    await operator.settle()
    secret, run = await operator.client.get(SECRET), await operator.run()
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == run["metadata"]["uid"]
    assert secret["immutable"] is True
    assert all(len(key) >= 43 for key in keys_of(secret).values())  # 256 bits in base 64
    assert len(set(keys_of(secret).values())) == 2
    reference = {"secretKeyRef": {"name": "demo-keys", "key": "worker"}}
    assert (await environment(operator))["VCPO_WORKER_KEY"] == reference


async def test_the_keys_are_sent_to_nobody_else(operator):
    await operator.create()
    await operator.settle()
    keys = keys_of(await operator.client.get(SECRET)).values()
    everything = {
        name: await operator.client.get(f"{NAMESPACE}/{name}") for name in ("events", "pods")
    }
    told = json.dumps([await operator.run(), await operator.client.get(DEPLOYMENT), everything])
    assert not any(key in told for key in keys)
    assert not any(base64.b64encode(key.encode()).decode() in told for key in keys)


async def test_a_deleted_secret_is_replaced_and_so_are_the_pods_that_hold_the_old_one(operator):
    await operator.create()
    await operator.settle()
    before, hash_before = await operator.client.get(SECRET), await template_hash(operator)
    learner = f"{NAMESPACE}/pods/demo-learner-0"
    pod_before = await operator.client.get(learner)
    await operator.client.delete(SECRET)
    operator.now_s += PERIOD_S
    await operator.settle()
    after = await operator.client.get(SECRET)
    assert not {*keys_of(after).values()} & {*keys_of(before).values()}
    assert await template_hash(operator) != hash_before
    assert (await operator.client.get(learner))["metadata"]["uid"] != pod_before["metadata"]["uid"]
    events = await operator.client.get(f"{NAMESPACE}/events")
    told = [each["message"] for each in events["items"] if each["reason"] == "Recreated"]
    assert told == ["Secret demo-keys was deleted by another client and is created again."]


async def test_a_pod_that_cannot_start_without_it_brings_the_secret_back_at_once(operator):
    await operator.create()
    await operator.settle()
    await operator.client.delete(SECRET)
    pod = f"{NAMESPACE}/pods/demo-learner-0"
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "demo-keys" not found'}
    container = {"name": "learner", "image": "i", "imageID": "", "restartCount": 0, "ready": False}
    statuses = [{**container, "state": {"waiting": waiting}}]
    await operator.client.merge_patch(f"{pod}/status", {"status": {"containerStatuses": statuses}})
    await operator.settle()
    assert keys_of(await operator.client.get(SECRET))


async def test_a_secret_that_the_run_names_is_used_and_none_is_made(operator):
    body = {"metadata": {"name": "mine"}, "stringData": {role: role.value for role in RUN_ROLES}}
    await operator.client.create(f"{NAMESPACE}/secrets", body)
    await operator.create(pods={"keysSecretName": "mine"})
    await operator.settle()
    assert (await environment(operator))["VCPO_WORKER_KEY"]["secretKeyRef"]["name"] == "mine"
    assert operator.connections.steering_keys == {operator.key_of(): "steering"}
    listed = await operator.client.get(f"{NAMESPACE}/secrets")
    assert "demo-keys" not in {each["metadata"]["name"] for each in listed["items"]}


async def name_a_secret(operator, **keys):
    body = {"metadata": {"name": "mine"}, "stringData": {"worker": "w", **keys}}
    await operator.client.create(f"{NAMESPACE}/secrets", body)
    await operator.create(pods={"keysSecretName": "mine"})
    await operator.settle()


async def test_a_key_that_nobody_can_show_is_named_with_its_secret_and_the_cure(operator):
    await name_a_secret(operator, steering="two\nlines")
    reason, message = await condition(operator, "Ready")
    assert reason == "KeyUnusable"
    assert message.startswith("Secret mine, key `steering`: must be printable ASCII")
    assert "openssl rand" in message
    assert operator.connections.steering_keys == {operator.key_of(): ""}


async def test_somebody_elses_secret_of_the_name_is_left_alone_and_the_run_says_so(operator):
    body = {"metadata": {"name": "demo-keys"}, "stringData": {"steering": "s"}}
    theirs = await operator.client.create(f"{NAMESPACE}/secrets", body)
    await operator.create()
    await operator.settle()
    reason, message = await condition(operator, "Ready")
    assert reason == "NameTaken"
    assert "`pods.keysSecretName`" in message
    assert await operator.client.get(SECRET) == theirs
    assert operator.connections.steering_keys == {operator.key_of(): ""}, (
        "what is theirs is shown to no learner"
    )


class Learner(control_pb2_grpc.ControlServiceServicer):
    """A learner that notes the keys that it is shown."""

    def __init__(self):
        self.shown = set()

    async def GetSignals(self, request, context):  # noqa: N802 - gRPC's name
        self.shown.add(dict(context.invocation_metadata())[AUTHORIZATION].removeprefix("Bearer "))
        return signals_message(phase=work_pb2.RUN_PHASE_RUNNING, lag_limit_steps=8)


async def test_each_learner_is_shown_its_own_key_for_steering_over_tls_and_answers_to_no_other(
    operator, tmp_path
):
    operator.now_s = time.time()  # real handshakes look at the real clock
    runs = {name: operator.key_of(name) for name in ("demo", "other")}
    learners, addresses = {name: Learner() for name in runs}, {}
    for name in runs:
        await operator.client.create(RUNS, run_body(name))
        await operator.reconcile(runs[name])  # makes the keys
    async with AsyncExitStack() as stack:
        for name, key in runs.items():
            secret = await operator.client.get(f"{NAMESPACE}/secrets/{name}-keys")
            server = WireServer(keys=keys_of(secret))
            control_pb2_grpc.add_ControlServiceServicer_to_server(
                learners[name], server.grpc_server
            )
            folder = tmp_path / name
            folder.mkdir()
            made = await operator.client.get(f"{NAMESPACE}/secrets/{name}-tls")
            for file, entry in (
                ("ca.crt", "ca.crt"),
                ("tls.crt", "learner.crt"),
                ("tls.key", "learner.key"),
            ):
                (folder / file).write_bytes(base64.b64decode(made["data"][entry]))
            port = await server.start(
                "127.0.0.1:0",
                ("vcpo.wire.v1.ControlService",),
                certificates=CertificateFolder(folder),
            )
            stack.push_async_callback(server.stop, 0.0)
            addresses[key] = f"127.0.0.1:{port}"
        operator.connections = LearnerConnections(
            clock=lambda: operator.now_s, address_of=lambda key: addresses[key]
        )
        stack.push_async_callback(operator.connections.close)
        operator.restart_operator()  # it reads what the one before it made
        keys = {}
        for name, key in runs.items():
            await operator.settle(key)
            secret = await operator.client.get(f"{NAMESPACE}/secrets/{name}-keys")
            keys[name] = steering_key_of(secret)
    assert keys["demo"] != keys["other"]
    assert {name: each.shown for name, each in learners.items()} == {
        name: {key} for name, key in keys.items()
    }


@pytest.fixture
async def unreadable(operator):
    """A run that trains, and an operator that comes later and may not read Secrets."""
    await operator.train()
    why = 'User "operator" cannot get resource "secrets" in API group ""'
    error = forbidden("secrets", "demo-keys", why)
    fault = Fault(error=error, resource="secrets", user_agent=USER_AGENT, times=None)
    operator.server.faults.add(fault)
    operator.restart_operator()
    return operator


@ON_THE_FAKE
async def test_a_run_whose_secret_may_not_be_read_says_which_right_is_missing(unreadable):
    assert not (await unreadable.reconcile()).error
    reason, message = await condition(unreadable, "Ready")
    assert reason == "ApplyFailed"
    assert 'cannot get resource "secrets"' in message
    assert "`get`, `create` and `update` of secrets" in message
    unreadable.server.faults.clear()
    unreadable.now_s += PERIOD_S
    await unreadable.settle()
    assert (await condition(unreadable, "Ready"))[0] != "ApplyFailed"


@ON_THE_FAKE
async def test_a_run_whose_secret_may_not_be_read_keeps_its_pods_and_its_key(unreadable):
    before, hash_before = await unreadable.client.get(SECRET), await template_hash(unreadable)
    two = [{"name": "main", "minReplicas": 2, "maxReplicas": 3}]
    await unreadable.edit(rollouts=two)
    await unreadable.settle()
    assert await unreadable.replicas() == 1
    assert await template_hash(unreadable) == hash_before
    assert await unreadable.client.get(SECRET) == before
    assert unreadable.connections.steering_keys[unreadable.key_of()] == steering_key_of(before)
    generation = (await unreadable.run())["metadata"]["generation"]
    assert (await unreadable.run())["status"]["observedGeneration"] == generation
