"""The process that scores answers: reads a JSON question per line, writes a JSON verdict per line.

Some scorers of the library evaluate an answer as Python. Those that expect a literal get a parser
of literals instead; those that expect a formula, which sympy's parser evaluates, get no answer that
is more than numbers, variables, operators and functions of mathematics. Every answer is scored in a
fork with limits that ends with it, so no answer changes how the next one is scored.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import re
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from vcpo.service.lifecycle import wake_at_parent_exit
from vcpo_rollout.environments.reasoning_gym.dataset import GeneratedItems, question_sum
from vcpo_rollout.sandbox.child import limit

LIMIT_S: Final = 10.0
"""Time for one answer; one that takes longer scores 0."""
_MEMORY_BYTES: Final = 4 << 30
_LITERALS: Final = frozenset(
    {"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"}
)
"""Data sets whose scorers call `eval` for a list or a text, and for nothing else."""
_FORMULAS: Final = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""Data sets whose scorers call `sympy.parse_expr`, which evaluates Python."""
_NO_FORMULA: Final = re.compile(r"[^\w\s+\-*/^()!,.]|\.\s*[A-Za-z_]", re.ASCII)
"""Text that no formula has: other characters, quotes among them, and attributes."""
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FUNCTIONS: Final = frozenset({"Rational", "abs", "cbrt", "root", "sqrt"})
"""Names that are plain functions in sympy and Python, and that a formula may have."""


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


def is_formula(answer: str) -> bool:
    """Whether sympy's parser calls nothing for an answer but functions of mathematics.

    It takes a name for a variable unless sympy or Python has it.
    """
    import sympy
    from sympy.core.function import FunctionClass

    if not answer.isascii() or _NO_FORMULA.search(answer):
        return False
    return all(
        name in _FUNCTIONS
        or isinstance(getattr(sympy, name, None), FunctionClass | sympy.Basic)
        or not (hasattr(sympy, name) or hasattr(builtins, name))
        for name in _NAME.findall(answer)
    )


def _score(items: GeneratedItems, item: dict[str, Any], answer: str, writing: int) -> None:
    """Write the score of an answer to a descriptor; without any when the scorer fails.

    Those that evaluate formulas score what is none as the library scores an empty answer.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # the verdicts of others
        os.dup2(null, descriptor)
    limit(cpu_s=int(LIMIT_S), memory_bytes=_MEMORY_BYTES, file_bytes=0)
    if items.name in _FORMULAS and not is_formula(answer):
        answer = ""
    score = items.dataset.score_answer(answer, item)
    os.write(writing, repr(float(score)).encode())


if __name__ == "__main__":
    main()
