"""The child process of `judge`: reads one JSON question per line, writes one verdict per line.

sympy may compute for ever or use all memory for a few characters, and the time limits of
math-verify are alarms, which only a main thread can have. This process has its own main thread, and
`judge` can kill it.
"""

import json
import logging
import resource
import sys
from typing import Final

from math_verify import parse, verify

from vcpo.service.lifecycle import wake_at_parent_exit

ALARM_S: Final = 3
"""Time limit for parsing an expression, and for each comparison."""

MAX_MEMORY_BYTES: Final = 2 << 30

_CPU_S: Final = 30
"""CPU time for one question; then the system kills this process. An alarm does not interrupt a
power of large integers, and the parent that would kill it may have died."""


def is_equal(reference: str, candidate: str) -> bool:
    """Whether two LaTeX expressions, or plain numbers, have the same meaning."""
    gold, target = (
        parse(f"\\boxed{{{each}}}", parsing_timeout=ALARM_S) for each in (reference, candidate)
    )
    return bool(verify(gold, target, timeout_seconds=ALARM_S))


def main() -> None:
    """Compare until standard input ends."""
    wake_at_parent_exit()
    # Models write much that cannot be parsed; the library would log each case.
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # What a library prints must not be read as a verdict.
    verdicts, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used_s = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + _CPU_S, resource.RLIM_INFINITY))
        question = json.loads(line)
        try:
            verdict = is_equal(question["reference"], question["candidate"])
        except Exception:  # noqa: BLE001 - the library may raise anything on a model's text
            verdict = False
        verdicts.write(f"{json.dumps(verdict)}\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
