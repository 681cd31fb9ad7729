import os
import signal
from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.models import trajectory
from tests.fixtures.learner.ranks import end_ranks, run_ranks
from vcpo.wire.packing import ExpertRoutes, PackedLogprobs
from vcpo.wire.trajectory import TokenSpan
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.training.mirrored_update import as_sent, groups_from_bytes, groups_to_bytes


def test_groups_survive_the_way_through_bytes():
    span = TokenSpan(start=1, num_tokens=1)
    inserted = replace(trajectory(3, logprobs=(-1.0, -0.5)), inserted_spans=(span,))
    routes = ExpertRoutes(experts=bytes(range(8)), num_layers=2, num_choices=1, is_wide=True)
    routed = replace(trajectory(4), expert_routes=routes)
    groups = as_sent(
        [[trajectory(0, reward=1 / 3), trajectory(1, policy_version=7)], [inserted, routed]]
    )
    assert groups_from_bytes(groups_to_bytes(groups)) == groups
    assert groups_from_bytes(groups_to_bytes([[]])) == [[]]


def test_rank_0_computes_with_the_numbers_that_it_sends():
    (sent,) = as_sent([[trajectory(0, logprobs=(-0.1, -0.2, -0.3))]])[0]
    assert isinstance(sent.rollout_logprobs, PackedLogprobs)
    assert sent.rollout_logprobs.tolist() == torch.tensor([-0.1, -0.2, -0.3]).tolist()


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

    def handle(fields, payload):
        seen.append((fields, payload))
        shared(fields["value"])

    def shared(value):
        own = torch.zeros(ranks.size, dtype=torch.float64)
        own[ranks.rank] = value / 3
        return ranks.share(own).tolist()

    def fail(*_):
        raise ValueError("the batch is bad")

    def lead(commands):
        first = commands.call("add", lambda: shared(1.0), fields={"value": 2.0}, payload=b"bytes")
        try:
            commands.call("fail", fail)
        except ValueError as error:
            first.append(str(error))
        return first, commands.call("add", lambda: shared(1.0), fields={"value": 1.0})

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
        assert seen == [({"value": 2.0}, b"bytes"), ({"value": 1.0}, b"")]


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
