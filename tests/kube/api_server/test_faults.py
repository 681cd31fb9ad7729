from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.fakes.kubernetes import faults
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.errors import ApiError
from tests.fakes.kubernetes.faults import Effect, Fault
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import config_map

PATH = "/api/v1/namespaces/default/configmaps"
LOST = (aiohttp.ClientError, ConnectionError)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (faults.stale(), 409, "Conflict"),
        (faults.too_old(), 410, "Expired"),
        (faults.overloaded(), 429, "TooManyRequests"),
        (faults.broken(), 500, "InternalError"),
        (faults.unavailable(), 503, "ServiceUnavailable"),
    ],
    ids=str,
)
async def test_a_rejected_request_changes_nothing(
    fake: FakeApiServer, client: Client, error: ApiError, code: int, reason: str
) -> None:
    fake.faults.add(Fault(error=error, verb="create"))
    refused = await client.post(PATH, config_map("a"))
    assert (refused.code, refused.body["reason"]) == (code, reason)
    assert (await client.get(PATH)).names == []


async def test_an_overloaded_server_says_when_to_come_back(
    fake: FakeApiServer, client: Client
) -> None:
    fake.faults.add(Fault(error=faults.overloaded(retry_after_s=7)))
    assert (await client.get(PATH)).body["details"]["retryAfterSeconds"] == 7


async def test_a_fault_hits_after_so_many_requests_and_so_many_times(
    fake: FakeApiServer, client: Client
) -> None:
    fake.faults.add(Fault(error=faults.broken(), verb="get", after=1, times=2))
    await client.post(PATH, config_map("a"))
    codes = [(await client.get(f"{PATH}/a")).code for _ in range(4)]
    assert codes == [200, 500, 500, 200]


async def test_a_fault_hits_only_what_it_names(fake: FakeApiServer, client: Client) -> None:
    fake.faults.add(Fault(error=faults.broken(), resource="configmaps", name="b"))
    await client.post(PATH, config_map("a"))
    assert (await client.get(f"{PATH}/a")).code == 200
    assert (await client.get(f"{PATH}/b")).code == 500


async def test_a_dropped_request_changes_nothing(fake: FakeApiServer, client: Client) -> None:
    fake.faults.add(Fault(effect=Effect.DROP, verb="create"))
    with pytest.raises(LOST):
        await client.post(PATH, config_map("a"))
    assert (await client.get(PATH)).names == []


async def test_a_lost_reply_leaves_the_change_behind(fake: FakeApiServer, client: Client) -> None:
    fake.faults.add(Fault(effect=Effect.LOSE_REPLY, verb="create"))
    with pytest.raises(LOST):
        await client.post(PATH, config_map("a"))
    assert (await client.get(PATH)).names == ["a"]


async def test_a_hanging_request_ends_when_the_faults_are_cleared(
    fake: FakeApiServer, client: Client
) -> None:
    fake.faults.add(Fault(effect=Effect.HANG, verb="create"))
    request = asyncio.create_task(client.post(PATH, config_map("a")))
    while not fake.recorder.writes():
        await asyncio.sleep(0)
    assert not request.done()
    fake.faults.clear()
    with pytest.raises(LOST):
        await request


async def test_kmock_answers_what_it_has_a_script_for(fake: FakeApiServer, client: Client) -> None:
    fake.kmock["get", "/api/v1/nodes"] << {"kind": "Scripted"}
    assert (await client.get("/api/v1/nodes")).body == {"kind": "Scripted"}
    assert (await client.get(PATH)).body["kind"] == "ConfigMapList"
