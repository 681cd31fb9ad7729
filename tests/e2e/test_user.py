"""The user of the end-to-end run, with kubectl and without."""

import json
import shutil

import pytest

from tests.e2e.cluster import DEFINITIONS, MODEL, RUN_FILE
from tests.e2e.user import RUNS, User, config_map, load
from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer

KUBECTL = shutil.which("kubectl")
BOTH = [
    pytest.param(None, id="by requests"),
    pytest.param(
        KUBECTL,
        id="by kubectl",
        marks=pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed"),
    ),
]


@pytest.fixture
async def client():
    async with FakeApiServer() as server, KubeClient(ApiAccess(url=server.url)) as opened:
        yield server, opened


@pytest.fixture(params=BOTH)
async def user(request, client, tmp_path):
    """Somebody whose cluster knows our kind."""
    server, opened = client
    kubeconfig = tmp_path / "kubeconfig.json"
    kubeconfig.write_text(json.dumps(server.kubeconfig()))
    somebody = User(kubeconfig, opened, request.param)
    for definition in DEFINITIONS:
        await somebody.apply(load(definition))
    await server.wait_until_settled()
    return somebody


async def steps(client):
    listed = await client[1].get(RUNS)
    return [run["spec"]["steps"] for run in listed["items"]]


async def test_the_example_is_applied_edited_and_deleted(user, client):
    await user.apply_file(RUN_FILE)
    await user.edit("sort-digits", {"steps": 7})
    assert await steps(client) == [7]
    await user.delete("sort-digits")
    assert await steps(client) == []


async def test_the_model_fits_into_a_config_map(user, client):
    await user.apply(config_map("tiny-model", MODEL))
    kept = await client[1].get("/api/v1/namespaces/default/configmaps/tiny-model")
    assert set(kept["binaryData"]) == {file.name for file in MODEL.iterdir()}
