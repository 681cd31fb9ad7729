"""The fixture that forks ranks from a test's process."""

import gc

import torch.distributed as dist

from tests.fixtures.learner.ranks import run_ranks
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
