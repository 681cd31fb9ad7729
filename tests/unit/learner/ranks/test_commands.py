import ipaddress
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.fixtures.learner.ranks import end_processes, end_ranks, run_ranks
from vcpo.api.learner import Learner
from vcpo_learner.ranks import commands as commands_module
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import Ranks, join_ranks


def test_one_rank_calls_and_shares_nothing():
    ranks = Ranks(device=torch.device("cpu"))
    values = torch.tensor([1.0, 2.0])
    assert ranks.share(values) is values
    assert values.tolist() == [1.0, 2.0]
    assert Commands(ranks).call("any", lambda: 7) == 7


def lead_or_follow(ranks, commands, lead):
    """The result of `lead(commands)` on rank 0; the others follow."""
    if not ranks.is_leader:
        commands.follow()
        return None
    result = lead(commands)
    commands.stop()
    return result


def exchange(ranks):
    commands, seen = Commands(ranks), []

    def add(value, state):
        seen.append((value, state))
        own = torch.zeros(ranks.size, dtype=torch.float64)
        own[ranks.rank] = value / 3
        return ranks.share(own).tolist()

    def fail(*_):
        raise ValueError("the batch is bad")

    def lead(commands):
        state = {"whole": torch.tensor(1.0)}
        first = commands.call("add", lambda: add(1.0, {}), 2.0, state=state)
        try:
            commands.call("fail", fail)
        except ValueError as error:
            first.append(str(error))
        return first, commands.call("add", lambda: add(1.0, {}), 1.0, state=state)

    commands.on("add", add)
    commands.on("fail", fail)
    return lead_or_follow(ranks, commands, lead), seen


def test_commands_run_on_all_ranks_and_a_common_error_ends_only_its_command():
    (result, _), *followers = run_ranks(3, exchange)
    assert result == ([1 / 3, 2 / 3, 2 / 3, "the batch is bad"], [1 / 3, 1 / 3, 1 / 3])
    for _, seen in followers:
        assert seen == [(2.0, {"whole": 1.0}), (1.0, {"whole": 1.0})]


def lose_rank_1(ranks, how):
    """A command in which rank 1 does something else than to join the collective."""
    commands = Commands(ranks)

    def join(*_):
        if ranks.rank == 1:
            how()
        for _ in range(3):
            ranks.share(torch.zeros(4))

    commands.on("join", join)
    lead_or_follow(ranks, commands, lambda commands: commands.call("join", join))


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_alone():
    raise MemoryError("rank 1 is full")


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_others(size):
    ended = end_ranks(size, lambda ranks: lose_rank_1(ranks, kill_self), timeout_s=2)
    assert ended[1].status == -signal.SIGKILL
    assert all("LostRankError" in one.error for rank, one in enumerate(ended) if rank != 1)


def test_a_rank_that_failed_alone_does_not_keep_the_others_waiting():
    def fail_quickly(ranks):
        commands_module._GRACE = timedelta(seconds=1)
        lose_rank_1(ranks, raise_alone)

    started_s = time.monotonic()
    ended = end_ranks(2, fail_quickly, timeout_s=600)
    assert time.monotonic() - started_s < 120.0
    assert all("rank 1: MemoryError: rank 1 is full" in one.error for one in ended)


def test_an_error_in_a_rank_that_no_other_waits_for_is_heard_at_once():
    def fail_after_all(ranks):
        commands = Commands(ranks)

        def work(*_):
            if ranks.rank == 1:
                raise_alone()

        commands.on("work", work)
        lead_or_follow(ranks, commands, lambda commands: commands.call("work", work))

    ended = end_ranks(2, fail_after_all, timeout_s=600)
    message = "'work' did not end alike on all ranks: rank 1: MemoryError: rank 1 is full"
    assert all(message in one.error for one in ended)


_LISTENING = "0A"


def listening_addresses(_=None):
    """The addresses at which this process listens for TCP."""
    links = [Path(f"/proc/self/fd/{each.name}") for each in Path("/proc/self/fd").iterdir()]
    own = {str(each.readlink()) for each in links if each.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in own:
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def test_ranks_of_one_machine_listen_on_its_loopback_address_alone():
    found = run_ranks(2, listening_addresses)
    assert found == [{"127.0.0.1"}] * 2  # the store, and the connections of each


def test_ranks_that_do_not_come_are_named():
    learner = Learner.model_validate({"collectiveTimeoutSeconds": 1})
    first, _ = end_processes(2, come_alone, learner)
    assert "rank 1 of 2 did not come within 1 s" in first.error


def come_alone(environment, learner):
    if environment.rank == 0:
        join_ranks(environment, learner, "cpu")
