"""Servers for tests: the fake one, and the same tests against a real one where it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.kubernetes.access import ADMIN
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.real_api_server import (
    ADMIN_TOKEN,
    Endpoint,
    binaries_here,
    run_control_plane,
)
from tests.fixtures.operator.operator import OperatorFixture, operator_fixture

TOKENS = {ADMIN_TOKEN: ADMIN}


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
