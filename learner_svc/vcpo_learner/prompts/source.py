"""Where the next training prompt comes from: the seam, and counting."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import ledger_pb2


class PromptSource(Protocol):
    """Chooses training prompts by index. Owner: the ledger.

    Prompts that are owed (`vcpo_learner.ledger`) are granted before it is asked. It hears of every
    group that was answered in full, also of those that are never trained on.
    """

    def next_prompt(self, in_flight: Collection[int]) -> int | None:
        """Choose the prompt to grant next; None while there is none to grant.

        in_flight: prompts that were granted and are not answered yet.
        """

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Learn from all answers of one grant."""

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write everything that further choices depend on into the snapshot's fields for it."""

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on from a snapshot; what another kind of source saved there says nothing."""


class SequentialPrompts:
    """Every prompt in its turn, whatever is in flight."""

    def __init__(self, pool: int | None = None) -> None:
        """pool: prompts to go round in; None counts on for ever."""
        self._pool = pool
        self._next_turn = 0

    def next_prompt(self, in_flight: Collection[int]) -> int:
        """Choose the prompt after the last one."""
        turn = self._next_turn
        self._next_turn += 1
        return turn if self._pool is None else turn % self._pool

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Learn nothing."""

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write the number of turns."""
        snapshot.next_prompt_index = self._next_turn

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on counting."""
        self._next_turn = snapshot.next_prompt_index
