"""The process that compares mathematics: one JSON question per line in, one answer per line out.

Comparing goes through sympy, which may take forever or all memory over a few characters, and the
time limits of math-verify are alarms that only a main thread can have. Here is one, in a process
that can be ended (`math_judge`).
"""

import json
import logging
import resource
import sys
from typing import Final

from math_verify import parse, verify

ALARM_S: Final = 3
"""Time for reading an expression, and for each comparison."""

MAX_MEMORY_BYTES: Final = 2 << 30

_CPU_S: Final = 30
"""CPU time for one question, after which the system ends the process: an alarm does not interrupt
a power of large integers, and whoever would end it may have died."""


def is_equal(reference: str, answer: str) -> bool:
    """Whether two LaTeX expressions, or plain numbers, have the same meaning."""
    known, found = (
        parse(f"\\boxed{{{each}}}", parsing_timeout=ALARM_S) for each in (reference, answer)
    )
    return bool(verify(known, found, timeout_seconds=ALARM_S))


def _renew_cpu_limit() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + _CPU_S, resource.RLIM_INFINITY))


def main() -> None:
    """Answer until there is no further question."""
    # What cannot be read is the model's fault, and there will be a lot of it.
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # Whatever a library prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        _renew_cpu_limit()
        question = json.loads(line)
        try:
            verdict = is_equal(question["reference"], question["answer"])
        except Exception:  # noqa: BLE001 - somebody else's parser, on a model's text
            verdict = False
        answers.write(f"{json.dumps(verdict)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
