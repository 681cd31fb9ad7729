"""Ranks that meet: the store that they meet at is a server of rank 0."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.fixtures.learner.ranks import run_ranks
from vcpo_learner.ranks import ranks as ranks_module
from vcpo_learner.ranks.ranks import Ranks


def test_the_first_rank_stays_until_all_others_are_connected(monkeypatch):
    first_has_left = multiprocessing.get_context("fork").Event()

    class LateStore(TCPStore):
        def __init__(self, *, is_master: bool, **options: Any) -> None:
            super().__init__(is_master=is_master, **options)
            self.is_server = is_master

        def clone(self) -> TCPStore:
            # Connects once the first rank has had time to leave, and take its server with it.
            assert self.is_server or not first_has_left.wait(0.5)
            return super().clone()

    def leave(ranks: Ranks) -> None:
        if ranks.rank == 0:
            first_has_left.set()

    monkeypatch.setattr(ranks_module, "TCPStore", LateStore)
    assert run_ranks(2, leave) == [None, None]
