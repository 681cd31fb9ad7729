"""The fixture that forks ranks from a test's process, or from the fork server."""

import asyncio
import gc

import grpc
import torch.distributed as dist

from tests.fixtures.learner.ranks import end_ranks, run_ranks
from vcpo_learner.ranks.ranks import Ranks


def test_a_rank_leaves_the_groups_alone_that_a_test_before_it_left_behind():
    # A group has threads, and a forked child has none of them: to destroy it there is a crash.
    gc.disable()
    try:
        _leave_a_group_behind()
        assert run_ranks(2, _collect) == [None, None]
    finally:
        gc.enable()
        gc.collect()


def _leave_a_group_behind() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()


def _collect(ranks: Ranks) -> None:
    gc.collect()


def test_ranks_of_the_fork_server_call_grpc_beside_a_channel_that_a_test_left_open():
    async def open_channel() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("127.0.0.1:1")

    channel = asyncio.run(open_channel())
    try:
        assert run_ranks(2, _call_grpc, start_method="forkserver") == [True, True]
    finally:
        asyncio.run(channel.close())


def test_a_forked_rank_that_calls_grpc_is_refused_also_where_no_channel_is_open():
    for rank in end_ranks(2, _call_grpc):
        assert "start it with start_method='forkserver'" in rank.error


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
