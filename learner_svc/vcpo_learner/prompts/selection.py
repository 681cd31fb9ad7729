"""Prompts chosen from a pool by how much there is to learn from them.

```
    pool 0..n-1  --- 16 at random, none in flight ---> candidates --- most undecided ---> granted
                                                                        ^                    |
                                                 rewards and version    |                    v
                                            posterior or teacher <------+------- answered in full
```

Candidates are few so that the pool keeps coming round: the most undecided prompt of all would be
granted again and again. A prompt in flight is no candidate, since its answers are the evidence that
is missing; a group granted a second time meanwhile would repeat the choice blindly.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from vcpo.spec import VCPORunSpec
from vcpo.spec.algorithm import PromptSelection
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.prompts.posterior import PosteriorSettings, PromptPosterior
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts
from vcpo_learner.prompts.teacher import PromptTeacher, TeacherSettings

NUM_CANDIDATES: Final = 16
"""Prompts that are compared for one choice."""

TEACHER_ROWS: Final = 4096
"""Embeddings of the teacher; token ids that leave the same remainder share one. A table for every
token of a large vocabulary would take a hundred times the memory, and a step the event loop's time.
"""


def prompt_source(spec: VCPORunSpec) -> PromptSource:
    """Build the source that a run asks for."""
    pool = spec.batch.prompt_pool
    match spec.batch.prompt_selection:
        case PromptSelection.POSTERIOR if pool is not None:
            return PosteriorPrompts(pool, seed=spec.seed)
        case PromptSelection.TEACHER if pool is not None:
            return TeacherPrompts(pool, seed=spec.seed)
    return SequentialPrompts(pool)


class PosteriorPrompts:
    """The candidate whose success is the most undecided (`vcpo_learner.prompts.posterior`)."""

    def __init__(self, pool: int, *, seed: int) -> None:
        self._pool = pool
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._settings = PosteriorSettings()
        self._posterior = PromptPosterior(self._settings)

    def next_prompt(self, in_flight: Collection[int]) -> int | None:
        """Choose among candidates; None while the whole pool is in flight."""
        drawn = candidates(self._pool, in_flight, self._rng)
        return self._posterior.choose(drawn, self._rng) if drawn else None

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Count the answers at the age of their oldest token."""
        version = min(each.oldest_policy_version for each in trajectories)
        self._posterior.observe(prompt_index, successes(trajectories), policy_version=version)

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write counts and generator."""
        state = {"posterior": self._posterior.to_dict(), "generator": self._rng.getstate()}
        snapshot.posterior = json.dumps(state)

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on with counts and generator, when a posterior saved the snapshot."""
        if snapshot.HasField("posterior"):
            state = json.loads(snapshot.posterior)
            self._posterior = PromptPosterior.from_dict(state["posterior"], self._settings)
            _set_state(self._rng, state["generator"])


class TeacherPrompts:
    """The candidate that a learned teacher scores highest (`vcpo_learner.prompts.teacher`).

    A prompt's text is known once it was answered, for it comes with its answers. Hence every prompt
    of the pool is granted once, in order, before the teacher is asked.
    """

    def __init__(self, pool: int, *, seed: int, num_rows: int = TEACHER_ROWS) -> None:
        self._pool = pool
        self._num_rows = num_rows
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._teacher = PromptTeacher(TeacherSettings(), vocabulary_size=num_rows, seed=seed)
        self._rows: dict[int, tuple[int, ...]] = {}
        self._next_turn = 0

    def next_prompt(self, in_flight: Collection[int]) -> int | None:
        """Choose an unseen prompt, else among candidates; None while the pool is in flight."""
        while self._next_turn < self._pool:
            turn = self._next_turn
            self._next_turn += 1
            if turn not in in_flight:
                return turn
        drawn = candidates(self._pool, in_flight, self._rng)
        # One that nobody could answer has no text; it has its chance when all are of this kind.
        known = [index for index in drawn if index in self._rows]
        if not known:
            return drawn[0] if drawn else None
        return known[self._teacher.choose([self._rows[index] for index in known], self._rng)]

    def observe(self, prompt_index: int, trajectories: Sequence[Trajectory]) -> None:
        """Note text and outcome, and take one step of learning."""
        rows = tuple(token % self._num_rows for token in trajectories[0].prompt_token_ids)
        self._rows[prompt_index] = rows
        self._teacher.observe(rows, math.fsum(successes(trajectories)), len(trajectories))
        self._teacher.train_step()

    def save(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Write turns, texts, teacher and generator."""
        snapshot.next_prompt_index = self._next_turn
        state = {
            "teacher": self._teacher.state_dict(),
            "rows": [(index, list(rows)) for index, rows in self._rows.items()],
            "generator": self._rng.getstate(),
        }
        snapshot.teacher = _to_bytes(state)

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on with all of it, when a teacher saved the snapshot."""
        if snapshot.HasField("teacher"):
            state = torch.load(io.BytesIO(snapshot.teacher), weights_only=True)
            self._next_turn = snapshot.next_prompt_index
            self._teacher.load_state_dict(state["teacher"])
            self._rows = {index: tuple(rows) for index, rows in state["rows"]}
            _set_state(self._rng, state["generator"])


def candidates(pool: int, in_flight: Collection[int], rng: random.Random) -> list[int]:
    """Draw up to `NUM_CANDIDATES` different prompts of 0..pool-1, none of them in flight.

    Any set of them is as likely as any other; fewer come only when no more are free.
    """
    drawn = rng.sample(range(pool), min(pool, NUM_CANDIDATES + len(in_flight)))
    return [index for index in drawn if index not in in_flight][:NUM_CANDIDATES]


def successes(trajectories: Iterable[Trajectory]) -> list[float]:
    """Rewards as parts of a success; one outside [0, 1] counts as the nearer end."""
    return [min(1.0, max(0.0, each.reward)) for each in trajectories]


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _set_state(rng: random.Random, state: Sequence[Any]) -> None:
    version, words, spare = state
    rng.setstate((version, tuple(words), spare))
