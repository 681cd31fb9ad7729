"""Certificates of a run, judged by Python's own TLS and by another library's reading."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from kubernetes import client

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.errors import ApiError as ServerError
from tests.fakes.kubernetes.faults import Effect, Fault
from vcpo_operator.cluster_api.client import ApiError, Cluster, Resource
from vcpo_operator.cluster_api.run_secrets import (
    RENEWED_BEFORE_S,
    first_end_s,
    new_certificates,
    renewed_certificates,
)

DAY_S = 86_400.0
NAMES = {"learner": ["demo-learner", "demo-learner.ml.svc"], "rollout": ["demo-rollout"]}
NOW_S = 1_800_000_000.0


def verify(data, role, host, at_s):
    """Verify a role's certificate for a host as a client would; the chain has two."""
    store = Store([x509.load_pem_x509_certificate(data["ca.crt"])])
    moment = datetime.fromtimestamp(at_s, UTC)
    verifier = PolicyBuilder().store(store).time(moment).build_server_verifier(x509.DNSName(host))
    chain = verifier.verify(x509.load_pem_x509_certificate(data[f"{role}.crt"]), [])
    assert len(chain) == 2


@pytest.fixture(scope="module")
def data():
    return new_certificates("demo", NAMES, now_s=NOW_S)


@pytest.mark.parametrize(
    ("role", "host"),
    [("learner", "demo-learner"), ("learner", "demo-learner.ml.svc"), ("rollout", "demo-rollout")],
)
def test_a_client_accepts_each_name_of_a_role_while_its_certificate_is_valid(data, role, host):
    for at_s in (NOW_S - 3000.0, NOW_S, NOW_S + 89 * DAY_S):
        verify(data, role, host, at_s)
    for at_s in (NOW_S - 2 * DAY_S, NOW_S + 91 * DAY_S):
        with pytest.raises(VerificationError):
            verify(data, role, host, at_s)


def test_a_workers_certificate_is_none_of_the_learner(data):
    with pytest.raises(VerificationError):
        verify(data, "rollout", "demo-learner", NOW_S)


def test_a_certificate_of_a_role_signs_no_other(data):
    learner = x509.load_pem_x509_certificate(data["learner.crt"])
    assert not learner.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_every_role_and_every_run_has_a_private_key_of_its_own(data):
    other = new_certificates("demo", NAMES, now_s=NOW_S)
    keys = {each[name] for each in (data, other) for name in each if name.endswith(".key")}
    assert len(keys) == 6
    with pytest.raises(VerificationError):
        verify({**data, "ca.crt": other["ca.crt"]}, "learner", "demo-learner", NOW_S)


def test_a_renewed_certificate_has_the_same_authority_and_a_later_end(data):
    later_s = NOW_S + 60 * DAY_S
    renewed = renewed_certificates(data, NAMES, now_s=later_s)
    assert renewed["ca.crt"] == data["ca.crt"]
    assert renewed["learner.key"] != data["learner.key"]
    assert first_end_s(data, list(NAMES)) == NOW_S + 90 * DAY_S
    assert first_end_s(renewed, list(NAMES)) == later_s + 90 * DAY_S
    verify(renewed, "learner", "demo-learner", later_s + 89 * DAY_S)
    assert RENEWED_BEFORE_S == 30 * DAY_S


def test_a_long_name_of_a_run_fits_into_the_authority_s():
    data = new_certificates("r" * 63, {"learner": ["l"]}, now_s=NOW_S)
    verify(data, "learner", "l", NOW_S)
    public = x509.load_pem_x509_certificate(data["learner.crt"]).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)


SERVICE = Resource(api_version="v1", plural="services", namespace="default", name="s")
BODY = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "s", "namespace": "default"},
    "spec": {"ports": [{"port": 80}]},
}


@pytest.fixture(name="server")
async def running_server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        yield server


@pytest.fixture(name="cluster")
def connected_cluster(server: FakeApiServer) -> Cluster:
    settings = client.Configuration(host=server.url)
    settings.retries = False
    return Cluster(client.ApiClient(settings), timeout_s=0.3)


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        (SERVICE, "/api/v1/namespaces/default/services/s"),
        (
            Resource(
                api_version="apps/v1",
                plural="deployments",
                namespace="ml",
                name="d",
                subresource="scale",
            ),
            "/apis/apps/v1/namespaces/ml/deployments/d/scale",
        ),
        (
            Resource(api_version="v1", plural="events", namespace="ml"),
            "/api/v1/namespaces/ml/events",
        ),
    ],
)
def test_paths_are_those_of_the_api(resource: Resource, path: str):
    assert resource.path == path


async def test_what_is_not_there_is_none(cluster: Cluster):
    assert await cluster.get(SERVICE) is None


async def test_an_apply_makes_and_names_its_manager(cluster: Cluster):
    made = await cluster.apply(SERVICE, BODY, manager="me", force=False)
    assert made["metadata"]["managedFields"][0]["manager"] == "me"


async def test_a_field_of_another_manager_is_not_taken_without_force(cluster: Cluster):
    await cluster.apply(SERVICE, BODY, manager="first", force=False)
    other = {**BODY, "spec": {"ports": [{"port": 80, "targetPort": 81}], "type": "NodePort"}}
    await cluster.apply(SERVICE, other, manager="second", force=True)
    changed = {**BODY, "spec": {"ports": [{"port": 80}], "type": "ClusterIP"}}
    with pytest.raises(ApiError) as refused:
        await cluster.apply(SERVICE, changed, manager="first", force=False)
    assert refused.value.status == 409


async def test_deleting_what_is_gone_is_no_error(cluster: Cluster):
    await cluster.delete(SERVICE, uid="x")


async def test_an_object_with_another_uid_is_not_deleted(cluster: Cluster):
    await cluster.apply(SERVICE, BODY, manager="me", force=False)
    await cluster.delete(SERVICE, uid="somebody-else")
    assert await cluster.get(SERVICE) is not None


async def test_a_refusal_says_what_the_server_says(cluster: Cluster):
    broken = {**BODY, "metadata": {"name": "other", "namespace": "default"}}
    with pytest.raises(ApiError, match="name"):
        await cluster.apply(SERVICE, broken, manager="me", force=False)


@pytest.mark.parametrize("effect", [Effect.DROP, Effect.HANG])
async def test_no_answer_is_an_error_without_a_status(
    server: FakeApiServer, cluster: Cluster, effect: Effect
):
    server.faults.add(Fault(effect=effect, resource="services"))
    with pytest.raises(ApiError) as refused:
        await cluster.get(SERVICE)
    assert refused.value.status == 0


async def test_a_busy_servers_retry_after_is_passed_on(server: FakeApiServer, cluster: Cluster):
    busy = ServerError(429, "TooManyRequests", "later", retry_after_s=3)
    server.faults.add(Fault(error=busy, resource="services"))
    with pytest.raises(ApiError) as refused:
        await cluster.get(SERVICE)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 3.0)


async def test_every_answer_is_counted(server: FakeApiServer):
    seen: list[tuple[str, str, int]] = []
    settings = client.Configuration(host=server.url)
    cluster = Cluster(client.ApiClient(settings), on_answer=lambda *answer: seen.append(answer))
    await cluster.get(SERVICE)
    assert seen == [("GET", "services", 404)]


@pytest.mark.parametrize(
    ("status", "message", "is_invalid"),
    [
        (422, "anything", True),
        (500, "failed to create typed patch object (ml/a; v1, Kind=Pod): .x: not declared", True),
        (500, "failed to convert new object (ml/a; v1, Kind=Pod) to proper version: ...", True),
        (500, "failed to create manager for existing fields: failed to convert new object", False),
        (500, "etcdserver: request timed out", False),
        (409, "conflict", False),
    ],
)
def test_an_object_is_at_fault_where_the_same_again_would_be_refused_again(
    status: int, message: str, is_invalid: bool
):
    assert ApiError(status, message).is_invalid is is_invalid
