from __future__ import annotations

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.real_api_server import Endpoint


async def test_the_contract_also_runs_on_a_real_server(real_endpoint: Endpoint) -> None:
    async with Client(real_endpoint) as api:
        assert (await api.get("/version")).body["gitVersion"].startswith("v")
