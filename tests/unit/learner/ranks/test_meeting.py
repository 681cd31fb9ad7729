"""Ranks that meet: the store that they meet at is a server of rank 0."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.fixtures.learner.ranks import CONTEXT, Ended, end_processes
from vcpo.api.learner import Learner
from vcpo_learner.ranks import ranks as ranks_module
from vcpo_learner.ranks.ranks import join_ranks


def test_the_first_rank_stays_until_all_others_are_connected():
    met = end_processes(2, meet_at_a_late_store, Learner(), CONTEXT.Event())
    assert met == [Ended(), Ended()]


def meet_at_a_late_store(environment, learner, first_has_left):
    class LateStore(TCPStore):
        def __init__(self, *, is_master: bool, **options: Any) -> None:
            super().__init__(is_master=is_master, **options)
            self.is_server = is_master

        def clone(self) -> TCPStore:
            # Connects once the first rank has had time to leave, and take its server with it.
            assert self.is_server or not first_has_left.wait(0.5)
            return super().clone()

    ranks_module.TCPStore = LateStore
    ranks = join_ranks(environment, learner, "cpu")
    if ranks.is_leader:
        first_has_left.set()
    ranks.close()
