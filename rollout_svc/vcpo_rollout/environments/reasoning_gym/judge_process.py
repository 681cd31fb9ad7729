"""The process that scores answers: reads a JSON question per line, writes a JSON verdict per line.

Some scorers of the library evaluate an answer as Python (`eval`, or sympy's parser). Those that
expect a literal get a parser of literals instead. Every answer is scored in a fork that has given
up its rights as a program of `vcpo_rollout.sandbox` does, and that ends with it: it reads no file
but the interpreter's and packages', writes none, has no network, and no answer changes how the next
one is scored.
"""

from __future__ import annotations

import ast
import json
import math
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from vcpo.service.lifecycle import wake_at_parent_exit
from vcpo_rollout.environments.reasoning_gym.dataset import GeneratedItems, question_sum
from vcpo_rollout.sandbox.child import confine
from vcpo_rollout.sandbox.runner import NOBODY, READABLE

LIMIT_S: Final = 10.0
"""Time for one answer; one that takes longer scores 0."""
_MEMORY_BYTES: Final = 4 << 30
_LITERALS: Final = frozenset(
    {"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"}
)
"""Data sets whose scorers call `eval` for a list or a text, and for nothing else."""


def main() -> None:
    """Score until standard input ends."""
    wake_at_parent_exit()
    name, config, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    items = GeneratedItems(name, config, seed)
    if name in _LITERALS:
        vars(sys.modules[type(items.dataset).__module__])["eval"] = ast.literal_eval
    # What a library prints must not be read as a verdict.
    verdicts, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        verdicts.write(f"{json.dumps(_verdict(items, json.loads(line)))}\n")
        verdicts.flush()


def _verdict(items: GeneratedItems, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score of an answer, or that this process has another question at its index."""
    if "index" not in question:
        return {}
    item = items.at(question["index"])
    if question_sum(item) != question["sum"]:
        return {"differs": True}
    return {"score": _score_apart(items, item, question["answer"])}


def _score_apart(items: GeneratedItems, item: dict[str, Any], answer: str) -> float:
    """Return the score that a fork of this process computes; 0 if it computes none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _score(items, item, answer, writing)
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], LIMIT_S)
    text = os.read(reading, 64) if ready else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with suppress(ValueError):
        score = float(text)
        return score if math.isfinite(score) else 0.0
    return 0.0


def _score(items: GeneratedItems, item: dict[str, Any], answer: str, writing: int) -> None:
    """Write the score of an answer to a descriptor; without any when the scorer fails."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # the verdicts of others
        os.dup2(null, descriptor)
    confine(
        readable=[*READABLE, sys.prefix],
        nobody=NOBODY,
        cpu_s=int(LIMIT_S),
        memory_bytes=_MEMORY_BYTES,
    )
    score = items.dataset.score_answer(answer, item)
    os.write(writing, repr(float(score)).encode())


if __name__ == "__main__":
    main()
