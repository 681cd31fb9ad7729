from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime

import kubernetes
from kubernetes.client import CoreV1Api, V1ConfigMap, V1ObjectMeta

from tests.fakes.kubernetes.api_server import FakeApiServer, in_thread
from tests.fixtures.kubernetes.client import Client

DEFAULT = "/api/v1/namespaces/default"


def test_the_official_client_works_with_a_server_in_a_thread() -> None:
    with in_thread() as server:
        configuration = kubernetes.client.Configuration(host=server.url)
        with kubernetes.client.ApiClient(configuration) as client:
            core = CoreV1Api(client)
            body = V1ConfigMap(metadata=V1ObjectMeta(name="a"), data={"k": "v"})
            core.create_namespaced_config_map("default", body)
            assert core.read_namespaced_config_map("a", "default").data == {"k": "v"}


def test_the_command_line_prints_a_kubeconfig_that_works() -> None:
    command = [sys.executable, "-m", "tests.fakes.kubernetes.api_server", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            kubeconfig = json.loads(process.stdout.readline())
            url = kubeconfig["clusters"][0]["cluster"]["server"]
            with urllib.request.urlopen(f"{url}/version", timeout=10) as response:
                assert json.load(response)["gitVersion"].startswith("v1.")
        finally:
            process.terminate()


async def test_time_is_the_clock_s() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    async with FakeApiServer(clock=lambda: noon) as server:
        namespace = server.api.store.objects(("", "namespaces"))[0]
        assert namespace["metadata"]["creationTimestamp"] == "2026-01-01T12:00:00Z"


async def test_a_service_account_s_token_is_that_account(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(f"{DEFAULT}/serviceaccounts", {"metadata": {"name": "runner"}})
    issued = await client.post(f"{DEFAULT}/serviceaccounts/runner/token", {"spec": {}})
    bearer = {"Authorization": f"Bearer {issued.body['status']['token']}"}
    refused = await client.send("GET", f"{DEFAULT}/pods", headers=bearer)
    assert refused.code == 403
    assert "system:serviceaccount:default:runner" in refused.body["message"]


async def test_one_may_ask_what_one_may_do(client: Client) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    asked = {"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}}
    as_admin = await client.post(path, asked)
    as_bob = await client.send("POST", path, asked, headers={"Impersonate-User": "bob"})
    allowed = [answer.body["status"]["allowed"] for answer in (as_admin, as_bob)]
    assert allowed == [True, False]


async def test_a_body_in_an_unknown_format_is_refused(client: Client) -> None:
    protobuf = "application/vnd.kubernetes.protobuf"
    answer = await client.send("POST", f"{DEFAULT}/configmaps", {}, content_type=protobuf)
    assert answer.code == 415
