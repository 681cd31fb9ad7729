"""Certificates of a run: made by the operator, trusted, renewed in time, and never leaked."""

import base64
import json

import pytest

from tests.fixtures.operator.operator import DEPLOYMENT, KEY
from vcpo.wire.access.tls import NOBODY
from vcpo_operator.cluster_api.run_secrets import first_end_s

NAMESPACE = f"/api/v1/namespaces/{KEY.namespace}"
SECRET = f"{NAMESPACE}/secrets/demo-tls"
LEARNER = f"/apis/apps/v1/namespaces/{KEY.namespace}/statefulsets/demo-learner"
PERIOD_S = 300.0
DAY_S = 86_400.0
ROLES = ["learner", "rollout"]


def content(secret):
    return {name: base64.b64decode(each) for name, each in secret["data"].items()}


def end_s(secret):
    return first_end_s(content(secret), ROLES)


def trusted(operator):
    """The authority by which the operator knows the learner, by its name."""
    trust = operator.connections.trusts[operator.key_of()]
    assert trust.server_name == f"demo-learner.{operator.backend.namespace}.svc"
    return trust.authority


async def template(operator, path):
    return (await operator.client.get(path))["spec"]["template"]


async def test_a_run_gets_an_authority_that_the_operator_trusts_and_pods_mount_their_own(operator):
    await operator.create()
    await operator.settle()
    secret, run = await operator.client.get(SECRET), await operator.run()
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == run["metadata"]["uid"]
    assert trusted(operator) == content(secret)["ca.crt"]
    mounted = {}
    for role, path in (("learner", LEARNER), ("rollout", DEPLOYMENT)):
        volumes = (await template(operator, path))["spec"]["volumes"]
        (volume,) = (each["secret"] for each in volumes if each["name"] == "certificates")
        assert volume["secretName"] == "demo-tls"
        mounted[role] = {each["key"]: each["path"] for each in volume["items"]}
    assert mounted == {
        role: {"ca.crt": "ca.crt", f"{role}.crt": "tls.crt", f"{role}.key": "tls.key"}
        for role in ROLES
    }


async def test_no_private_key_leaves_the_secret(operator):
    await operator.create()
    await operator.settle()
    made = content(await operator.client.get(SECRET))
    keys = [made[name] for name in made if name.endswith(".key")]
    everything = [await operator.client.get(f"{NAMESPACE}/{name}") for name in ("events", "pods")]
    told = json.dumps([await operator.run(), await operator.client.get(DEPLOYMENT), everything])
    assert len(keys) == 3
    for key in keys:
        assert base64.b64encode(key).decode() not in told
        assert key.decode().splitlines()[1] not in told


async def test_certificates_are_renewed_before_they_end_by_the_same_authority(operator):
    await operator.create()
    await operator.settle()
    before, pods_before = await operator.client.get(SECRET), await template(operator, LEARNER)
    operator.now_s = end_s(before) - 30 * DAY_S - 2 * PERIOD_S
    await operator.settle()
    assert content(await operator.client.get(SECRET)) == content(before), "not due yet"
    operator.now_s = end_s(before) - 30 * DAY_S + PERIOD_S
    await operator.settle()
    after = await operator.client.get(SECRET)
    assert end_s(after) == pytest.approx(operator.now_s + 90 * DAY_S, abs=2 * PERIOD_S)
    assert content(after)["ca.crt"] == content(before)["ca.crt"]
    assert content(after)["learner.key"] != content(before)["learner.key"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert await template(operator, LEARNER) == pods_before, "no pod is replaced"
    await operator.settle()
    assert content(await operator.client.get(SECRET)) == content(after), "once is enough"


async def test_certificates_that_somebody_spoilt_are_made_anew(operator):
    await operator.create()
    await operator.settle()
    spoilt = {"data": {"ca.key": base64.b64encode(b"none").decode(), "learner.crt": None}}
    await operator.client.merge_patch(SECRET, spoilt)
    operator.now_s += PERIOD_S
    await operator.settle()
    after = content(await operator.client.get(SECRET))
    assert end_s({"data": {k: base64.b64encode(v) for k, v in after.items()}}) > operator.now_s
    assert trusted(operator) == after["ca.crt"]


async def test_a_secret_that_the_run_names_is_trusted_and_left_alone(operator):
    data = {"ca.crt": "authority", "tls.crt": "certificate", "tls.key": "key"}
    body = {"metadata": {"name": "mine"}, "stringData": data}
    theirs = await operator.client.create(f"{NAMESPACE}/secrets", body)
    await operator.create(pods={"tlsSecretName": "mine"})
    await operator.settle()
    assert trusted(operator) == b"authority"
    assert await operator.client.get(f"{NAMESPACE}/secrets/mine") == theirs
    listed = await operator.client.get(f"{NAMESPACE}/secrets")
    assert "demo-tls" not in {each["metadata"]["name"] for each in listed["items"]}


async def test_somebody_elses_secret_of_the_name_is_trusted_by_nobody(operator):
    body = {"metadata": {"name": "demo-tls"}, "stringData": {"ca.crt": "theirs"}}
    await operator.client.create(f"{NAMESPACE}/secrets", body)
    await operator.create()
    await operator.settle()
    conditions = (await operator.run())["status"]["conditions"]
    (ready,) = (each for each in conditions if each["type"] == "Ready")
    assert ready["reason"] == "NameTaken"
    assert "`pods.tlsSecretName`" in ready["message"]
    assert operator.connections.trusts == {operator.key_of(): NOBODY}


async def test_plain_text_is_asked_for_by_name(operator):
    await operator.create(pods={"transport": "PlainText"})
    await operator.settle()
    assert operator.connections.trusts == {operator.key_of(): None}
    spec = (await template(operator, LEARNER))["spec"]
    assert "certificates" not in {each["name"] for each in spec["volumes"]}
    (container,) = spec["containers"]
    assert "--plain-text" in container["command"]
