"""The interface of prompt sources, and the source that counts upwards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import ledger_pb2


class PromptSource(Protocol):
    """Chooses training prompts by index. Owner: the ledger.

    The ledger grants requeued prompts before it asks the source for a new one. It reports every
    complete group to the source, including groups that are never trained on.
    """

    def next_prompt(self, in_flight: Collection[int]) -> int | None:
        """Return the prompt to grant next; None if there is none at present.

        in_flight: prompts that were granted and are not complete.
        """

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Learn from the complete group of one prompt."""

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write all state that later choices depend on into the snapshot."""

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Continue from a snapshot; ignore the state of another kind of source."""


class SequentialPrompts:
    """Returns the prompts in order, whatever is in flight."""

    def __init__(self, pool: int | None = None) -> None:
        self._pool = pool
        self._next_turn = 0

    def next_prompt(self, in_flight: Collection[int]) -> int:
        turn = self._next_turn
        self._next_turn += 1
        return turn if self._pool is None else turn % self._pool

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Do nothing: the order does not depend on rewards."""

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        snapshot.next_prompt_index = self._next_turn

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        self._next_turn = snapshot.next_prompt_index
