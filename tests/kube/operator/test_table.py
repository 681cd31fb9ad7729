"""What `kubectl get vcporuns` shows."""

from dataclasses import replace

import aiohttp
import pytest

from tests.fixtures.kubernetes.kubectl import kubectl, needs_kubectl
from tests.fixtures.operator.operator import KEY, RUNS, operator_fixture, signals

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.fixture
async def operator(endpoint):
    """A run whose learner has taken five steps."""
    async with operator_fixture(endpoint) as started:
        await started.create()
        await started.settle()
        started.connections.signals = replace(signals(), reward_mean=0.25, tokens_per_s=512.0)
        await started.settle_with_progress()
        yield started


async def table(operator):
    access = operator.backend.access
    token = {"Authorization": f"Bearer {access.token}"} if access.token else {}
    headers = {"Accept": TABLE, **token}
    runs = RUNS.replace(KEY.namespace, operator.backend.namespace)
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(access.url + runs, ssl=access.tls or True) as answer,
    ):
        return await answer.json()


async def test_the_columns_say_how_a_run_is(operator):
    shown = await table(operator)
    names = [column["name"] for column in shown["columnDefinitions"] if not column["priority"]]
    assert names == [
        "Name",
        "Ready",
        "Reason",
        "Step",
        "ESS",
        "LR",
        "Warning",
        "Lag",
        "Rollouts",
        "Age",
    ]


async def test_wide_columns_say_why(operator):
    shown = await table(operator)
    names = [column["name"] for column in shown["columnDefinitions"] if column["priority"]]
    assert names == ["Reward", "Tokens/s", "Max lag", "Learner", "Restarts", "Message"]


async def test_cells_are_the_runs_numbers(operator):
    shown = await table(operator)
    names = [column["name"] for column in shown["columnDefinitions"]]
    cells = dict(zip(names, shown["rows"][0]["cells"], strict=True))
    wanted = {"Name": "demo", "Step": 5, "Lag": 1, "Max lag": 2, "Restarts": 0, "Rollouts": "0/1"}
    wanted |= {"Reward": 0.25, "Tokens/s": 512.0}
    assert {name: cells[name] for name in wanted} == wanted


@needs_kubectl
async def test_kubectl_prints_them(operator, tmp_path):
    header, row = (await kubectl(operator.backend, tmp_path, "get", "vrun")).splitlines()
    assert header.split()[:4] == ["NAME", "READY", "REASON", "STEP"]
    assert row.split()[0] == "demo"
