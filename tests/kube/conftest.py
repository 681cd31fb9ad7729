"""Servers for tests: the fake one, and the same tests against a real one where it is installed."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.kubernetes.access import ADMIN, User
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import WIDGET_DEFINITION
from tests.fixtures.kubernetes.real_api_server import (
    ADMIN_TOKEN,
    USER_NAME,
    USER_TOKEN,
    Endpoint,
    binaries_here,
    run_control_plane,
)
from tests.fixtures.operator.operator import OperatorFixture, operator_fixture

TOKENS = {ADMIN_TOKEN: ADMIN, USER_TOKEN: User(name=USER_NAME, groups=("system:authenticated",))}
_numbers = itertools.count(1)


@pytest.fixture
async def fake() -> AsyncIterator[FakeApiServer]:
    """A fake API server in the test's own event loop."""
    async with FakeApiServer(tokens=TOKENS) as server:
        yield server


@pytest.fixture
async def client(fake: FakeApiServer) -> AsyncIterator[Client]:
    """A client of the fake server with the administrator's token."""
    async with Client(Endpoint(url=fake.url, token=ADMIN_TOKEN)) as client:
        yield client


@pytest.fixture(scope="session")
def real_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A real control plane for all tests of the session; skips them where there is none."""
    binaries = binaries_here()
    if isinstance(binaries, str):
        pytest.skip(binaries)
    with run_control_plane(binaries, tmp_path_factory.mktemp("control-plane")) as endpoint:
        yield endpoint


# One test says why the real server is missing; a skip for each test would drown it.
@pytest.fixture(params=["fake"] if isinstance(binaries_here(), str) else ["fake", "real"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Endpoint]:
    """Either server, as its administrator sees it."""
    if request.param == "real":
        yield request.getfixturevalue("real_endpoint")
        return
    async with FakeApiServer(tokens=TOKENS) as started:
        yield Endpoint(url=started.url, token=ADMIN_TOKEN)


@pytest.fixture(params=["fake"] if isinstance(binaries_here(), str) else ["fake", "real"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint | None:
    """A real server; None where the test is to start a fake one of its own."""
    return request.getfixturevalue("real_endpoint") if request.param == "real" else None


@pytest.fixture
async def operator(endpoint: Endpoint | None) -> AsyncIterator[OperatorFixture]:
    """An operator on either server; under `ON_THE_FAKE` on the fake one alone."""
    async with operator_fixture(endpoint) as started:
        yield started


@pytest.fixture
async def api(server: Endpoint) -> AsyncIterator[Client]:
    """A client of either server with the administrator's token."""
    async with Client(server) as client:
        yield client


@pytest.fixture
def with_controllers(server: Endpoint) -> None:
    """Skip where the server runs without a controller manager."""
    if not server.controllers:
        pytest.skip("no kube-controller-manager beside the kube-apiserver")


@pytest.fixture
async def namespace(api: Client) -> AsyncIterator[str]:
    """The path of a namespace that only this test uses."""
    name = f"contract-{next(_numbers)}"
    await api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    yield f"/namespaces/{name}"
    await api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
async def widgets(api: Client, namespace: str) -> str:
    """The path of the test's collection of a custom resource, defined first if need be."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await api.post(definitions, WIDGET_DEFINITION)
    await api.until(definitions, _is_established)
    return f"/apis/contract.test/v1{namespace}/widgets"


def _is_established(definition: dict[str, object]) -> bool:
    status = definition.get("status")
    # A real server's first answer has `conditions: null`.
    conditions = (status.get("conditions") or ()) if isinstance(status, dict) else ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
