"""Prompt sources: their interface, one that counts upwards, and one that asks a teacher."""

import math
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Protocol

from vcpo.api import VCPORunSpec
from vcpo.api.algorithm import PromptSelection
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.prompts.teacher import (
    PromptTeacher,
    TeacherSettings,
    state_from_bytes,
    state_to_bytes,
)


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


NUM_CANDIDATES: Final = 16
"""Prompts that one choice compares."""

TEACHER_ROWS: Final = 4096
"""Rows of the teacher's embedding; token ids with the same remainder share a row. A row for every
token of a large vocabulary would need a hundred times the memory, and its training steps would
block the event loop.
"""


def prompt_source(spec: VCPORunSpec) -> PromptSource:
    """Return the prompt source that a run asks for."""
    pool = spec.batch.prompt_pool
    if pool is not None and spec.batch.prompt_selection is PromptSelection.TEACHER:
        return TeacherPrompts(pool, seed=spec.seed)
    return SequentialPrompts(pool)


class TeacherPrompts:
    """Chooses the candidate with the highest score of the teacher (`vcpo_learner.prompts.teacher`).

    Candidates are a few random prompts: of the whole pool, the same one would win again and again.
    A prompt in flight is no candidate, because its rewards are not known yet.

    The learner knows the tokens of a prompt only from its trajectories. So it grants every prompt
    of the pool once, in order, before it asks the teacher. The teacher takes its training steps on
    the event loop.
    """

    def __init__(self, pool: int, *, seed: int, num_rows: int = TEACHER_ROWS) -> None:
        self._pool = pool
        self._num_rows = num_rows
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._teacher = PromptTeacher(TeacherSettings(), vocabulary_size=num_rows, seed=seed)
        self._rows: dict[int, tuple[int, ...]] = {}
        self._next_turn = 0

    def next_prompt(self, in_flight: Collection[int]) -> int | None:
        """Return an unseen prompt, else a candidate; None while the whole pool is in flight."""
        while self._next_turn < self._pool:
            turn = self._next_turn
            self._next_turn += 1
            if turn not in in_flight:
                return turn
        drawn = candidates(self._pool, in_flight, self._rng)
        # A prompt that never completed has no tokens; it is chosen if no candidate has any.
        known = [index for index in drawn if index in self._rows]
        if not known:
            return drawn[0] if drawn else None
        return known[self._teacher.choose([self._rows[index] for index in known], self._rng)]

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Record tokens and rewards, and take one training step."""
        rows = tuple(token % self._num_rows for token in trajectories[0].prompt_token_ids)
        self._rows[prompt_index] = rows
        self._teacher.observe(rows, math.fsum(successes(trajectories)), len(trajectories))
        self._teacher.train_step()

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write the turns, the prompts' tokens, the teacher and the random generator."""
        snapshot.next_prompt_index = self._next_turn
        state = {
            "teacher": self._teacher.state_dict(),
            "rows": [(index, list(rows)) for index, rows in self._rows.items()],
            "generator": self._rng.getstate(),
        }
        snapshot.teacher = state_to_bytes(state)

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Restore all of it, if the snapshot holds it."""
        if snapshot.HasField("teacher"):
            state = state_from_bytes(snapshot.teacher)
            self._next_turn = snapshot.next_prompt_index
            self._teacher.load_state_dict(state["teacher"])
            self._rows = {index: tuple(rows) for index, rows in state["rows"]}
            _set_state(self._rng, state["generator"])


def candidates(pool: int, in_flight: Collection[int], rng: random.Random) -> list[int]:
    """Draw up to `NUM_CANDIDATES` different prompts of 0..pool-1 that are not in flight.

    All sets of this size are equally likely. Returns fewer if fewer are not in flight; without any,
    it draws nothing, so that asking in vain does not change later choices.
    """
    if len(in_flight) >= pool and all(index in in_flight for index in range(pool)):
        return []
    drawn = rng.sample(range(pool), min(pool, NUM_CANDIDATES + len(in_flight)))
    return [index for index in drawn if index not in in_flight][:NUM_CANDIDATES]


def successes(trajectories: Iterable[Trajectory]) -> list[float]:
    """Return the rewards, clipped to [0, 1]."""
    return [min(1.0, max(0.0, each.reward)) for each in trajectories]


def _set_state(rng: random.Random, state: Sequence[Any]) -> None:
    version, words, spare = state
    rng.setstate((version, tuple(words), spare))
