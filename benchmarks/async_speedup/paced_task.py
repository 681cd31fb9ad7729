"""A task of the product whose responses take the time that hardware would take for long ones."""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.async_speedup.hardware import GROUP_SIZE, Lengths
from vcpo_rollout.environments.environment import Prompt, Split, make_environment

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedPrompt(Prompt):
    """A prompt whose group ends at a given time."""

    due_s: float
    """Time at which its longest response ends, on the task's clock."""


class PacedTask:
    """An `Environment`: the prompts and rewards of another, which judges a group when it is due.

    The worker generates the responses at once and holds their places until they are judged. Every
    lease draws new lengths, also of the same prompt. Held-out prompts take no time, but the first
    of them wait until every worker has one: a run evaluates before its first step, so no step is
    taken before. There must be more of them than all workers but one can hold.

    lengths: the fields of `Lengths`; decoding_step_s: seconds per token.
    workers_folder: folder in which each worker with a prompt leaves a file; workers: how many.
    """

    def __init__(
        self,
        *,
        seed: int,
        task: str,
        parameters: Mapping[str, Any],
        lengths: Mapping[str, Any],
        decoding_step_s: float,
        workers_folder: str,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._task = make_environment(task, parameters, seed)
        self._lengths = Lengths(**lengths)
        self._decoding_step_s = decoding_step_s
        self._workers_folder = Path(workers_folder)
        self._num_workers = workers
        self._clock = clock
        self._sleep = sleep
        self._rng = random.Random(f"{seed}/{os.getpid()}")  # noqa: S311 - no secret
        self._starting = threading.Lock()
        self._all_started = False

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the task's prompt; its group begins now."""
        prompt = self._task.prompt(split, index)
        if split is Split.EVALUATION:
            self._wait_for_all_workers()
            return prompt
        longest = max(self._lengths.draw(self._rng, 0) for _ in range(GROUP_SIZE))
        due_s = self._clock() + longest * self._decoding_step_s
        return PacedPrompt(
            text=prompt.text,
            messages=prompt.messages,
            answer=prompt.answer,
            metadata=prompt.metadata,
            due_s=due_s,
        )

    def reward(self, prompt: Prompt, response: str) -> float | Mapping[str, float]:
        """Return the task's reward once the prompt's group is due."""
        if isinstance(prompt, PacedPrompt):
            self._sleep(max(0.0, prompt.due_s - self._clock()))
        return self._task.reward(prompt, response)

    def _wait_for_all_workers(self) -> None:
        # One thread looks into the folder; the others wait for it.
        with self._starting:
            if not self._all_started:
                self._workers_folder.mkdir(exist_ok=True)
                (self._workers_folder / str(os.getpid())).touch()
            while not self._all_started:
                started = sum(1 for _ in self._workers_folder.iterdir())
                self._all_started = started >= self._num_workers
                if not self._all_started:
                    self._sleep(_POLL_S)
