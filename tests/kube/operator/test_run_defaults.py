"""A platform team's defaults reach the pods of runs, and a later change of them replaces none."""

import dataclasses

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fixtures.operator.operator import DEFAULTS, PODS, operator_fixture
from vcpo_operator.children.network import IngressSources

DEFAULTS_OF = "/apis/vcpo.dev/v1alpha1/namespaces/{}/vcporundefaults"
SYSTEM = "vcpo-system"


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


@pytest.fixture
async def installed():
    """An operator that runs in a namespace of its own, which only the fake server's view shows."""
    sources = IngressSources(operator_namespace=SYSTEM)
    async with operator_fixture() as started:
        started.restart_operator(dataclasses.replace(DEFAULTS, ingress_sources=sources))
        await started.client.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
        yield started


async def say(operator, namespace="default", name="default", **spec):
    body = {
        "apiVersion": "vcpo.dev/v1alpha1",
        "kind": "VCPORunDefaults",
        "metadata": {"name": name},
        "spec": spec,
    }
    path = f"{DEFAULTS_OF.format(namespace)}?fieldValidation=Strict"
    await operator.client.create(path, body)


async def learner(operator):
    return await operator.client.get(f"{PODS}/demo-learner-0")


def pool(name):
    return {"template": {"spec": {"nodeSelector": {"pool": name}}}}


async def test_the_status_says_what_came_from_where(installed):
    await say(installed, SYSTEM, defaults={"pods": pool("h100")})
    await say(installed, locked={"pods": {"tokenSecretName": "hub"}})
    await installed.create(pods={"tokenSecretName": "mine"})
    await installed.settle()
    pod = (await learner(installed))["spec"]
    assert pod["nodeSelector"] == {"pool": "h100"}
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"
    assert (await installed.run())["status"]["defaultsFrom"] == [
        {"field": "pods.template", "from": f"{SYSTEM}/default", "how": "Default"},
        {"field": "pods.tokenSecretName", "from": "default/default", "how": "Locked"},
    ]


async def test_changed_defaults_wait_as_an_upgrade_does(operator):
    await say(operator, defaults={"pods": pool("a100")})
    await operator.create()
    await operator.settle()
    before = (await learner(operator))["metadata"]["uid"]
    path = f"{DEFAULTS_OF.format('default')}/default"
    await operator.client.merge_patch(path, {"spec": {"defaults": {"pods": pool("h100")}}})
    await operator.settle()
    assert (await learner(operator))["metadata"]["uid"] == before
    (told,) = [
        each
        for each in (await operator.run())["status"]["conditions"]
        if each["type"] == "UpToDate"
    ]
    assert told["reason"] == "RevisionPending"
    assert 'nodeSelector.pool: "a100" -> "h100"' in told["message"]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("mine", {}),
        ("default", {"defaults": {"seed": 3}}),
        ("default", {"locked": {"pods": {"queueName": "gpus"}}}),
        ("default", {"defaults": {"pods": {"template": {"spec": {"nodeSelectr": {}}}}}}),
        ("default", {"defaults": {"upgradePolicy": "Sometimes"}}),
    ],
)
async def test_what_can_be_no_default_is_refused_when_it_is_applied(operator, name, spec):
    with pytest.raises(ApiStatusError):
        await say(operator, name=name, **spec)
