"""The fixture whose processes are ranks: they are no forks of the test's own process."""

import asyncio
import os
from pathlib import Path

import grpc

from tests.fixtures.learner.ranks import run_ranks
from vcpo_learner.ranks.ranks import Ranks


def test_the_process_that_ranks_are_forked_from_runs_one_thread():
    assert run_ranks(2, _threads_of_parent) == [1, 1]


def _threads_of_parent(ranks: Ranks) -> int:
    return sum(1 for _ in Path(f"/proc/{os.getppid()}/task").iterdir())


def test_ranks_call_grpc_beside_a_channel_that_a_test_left_open():
    # A fork of the test's process would wait for ever for the thread that serves the channel.
    async def open_channel() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("127.0.0.1:1")

    channel = asyncio.run(open_channel())
    try:
        assert run_ranks(2, _call_grpc) == [True, True]
    finally:
        asyncio.run(channel.close())


def _call_grpc(ranks: Ranks) -> bool:
    async def reach_own_server() -> bool:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        await server.stop(0.0)
        return True

    return asyncio.run(reach_own_server())
