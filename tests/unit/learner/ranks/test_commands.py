import os
import signal
from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.models import trajectory
from tests.fixtures.learner.ranks import end_ranks, run_ranks
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import TokenSpan, VersionSpan
from vcpo_learner.ranks.commands import Commands, groups_from_bytes, groups_to_bytes
from vcpo_learner.ranks.ranks import Ranks


def test_groups_survive_the_way_through_bytes():
    span = TokenSpan(start=1, num_tokens=1)
    sampled = VersionSpan(policy_version=0, num_tokens=2)
    inserted = replace(
        trajectory(3, logprobs=(-1.0, -0.5)), inserted_spans=(span,), version_spans=(sampled,)
    )
    routes = ExpertRoutes(experts=bytes(range(8)), num_layers=2, num_choices=1, is_wide=True)
    routed = replace(trajectory(4), expert_routes=routes)
    groups = [[trajectory(0, reward=1 / 3), trajectory(1, policy_version=7)], [inserted, routed]]
    found = groups_from_bytes(groups_to_bytes(groups))
    assert groups_from_bytes(groups_to_bytes(found)) == found
    assert [[plain(each) for each in group] for group in found] == groups
    assert groups_from_bytes(groups_to_bytes([[]])) == [[]]


def plain(each):
    """A trajectory with the types of Python."""
    names = ("prompt_token_ids", "response_token_ids", "rollout_logprobs")
    return replace(each, **{name: tuple(getattr(each, name)) for name in names})


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

    def handle(value):
        seen.append((value, commands.spread_state({})))
        shared(value)

    def add(value):
        commands.spread_state({"whole": torch.tensor(value)})
        return shared(value)

    def shared(value):
        own = torch.zeros(ranks.size, dtype=torch.float64)
        own[ranks.rank] = value / 3
        return ranks.share(own).tolist()

    def fail(*_):
        raise ValueError("the batch is bad")

    def lead(commands):
        first = commands.call("add", lambda: add(1.0), value=2.0)
        try:
            commands.call("fail", fail)
        except ValueError as error:
            first.append(str(error))
        return first, commands.call("add", lambda: add(1.0), value=1.0)

    commands.on("add", handle)
    commands.on("fail", fail)
    return lead_or_follow(ranks, commands, lead), seen


def test_commands_run_on_all_ranks_and_a_common_error_ends_only_its_command():
    (result, _), *followers = run_ranks(3, exchange)
    assert result == (
        [1 / 3, 2 / 3, 2 / 3, "the batch is bad"],
        [1 / 3, 1 / 3, 1 / 3],
    )
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
def test_a_killed_rank_ends_the_others_and_they_name_it(size):
    ended = end_ranks(size, lambda ranks: lose_rank_1(ranks, kill_self), timeout_s=2)
    assert ended[1].status == -signal.SIGKILL
    assert "rank 1 is gone or did not answer" in ended[0].error
    assert "rank 2" not in ended[0].error
    assert all("LostRankError" in one.error for rank, one in enumerate(ended) if rank != 1)


def test_an_error_of_one_rank_ends_all_and_they_say_it():
    ended = end_ranks(3, lambda ranks: lose_rank_1(ranks, raise_alone), timeout_s=2)
    assert "rank 1: MemoryError: rank 1 is full" in ended[0].error
    assert all("LostRankError" in one.error for one in ended)
