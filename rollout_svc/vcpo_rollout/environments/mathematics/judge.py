"""Compares mathematical expressions within a time limit; any thread may call it.

What compares a model's text may compute for ever or use all memory for a few characters. So a child
process does it: it reads a JSON question per line and writes a JSON verdict per line. If it does
not respond in time, it is killed, and the next question starts a new process.
"""

import json
import os
import select
import subprocess
import threading
import weakref
from typing import Any, Final

from vcpo.service.process import module_command

MAX_CHARACTERS: Final = 1024

_CHILD: Final = "vcpo_rollout.environments.mathematics.judge_process"
_START_S: Final = 180.0
"""Time for a new process to import its modules, on a busy machine."""


class MathJudge:
    """Decides whether two expressions have the same meaning, in one process, one at a time."""

    def __init__(self, limit_s: float = 10.0) -> None:
        self.process: subprocess.Popen[str] | None = None
        """The process that compares; None before the first question."""
        self._limit_s = limit_s
        self._lock = threading.Lock()

    def is_equal(self, reference: str, candidate: str) -> bool:
        """Whether two expressions, in LaTeX or as plain numbers, have the same meaning."""
        if candidate == reference:
            return True
        if not 0 < len(candidate) <= MAX_CHARACTERS:
            return False
        with self._lock:
            process = self._live_process()
            question = {"reference": reference, "candidate": candidate}
            verdict = _ask(process, question, self._limit_s)
            if verdict is None:
                _kill(process)
        return bool(verdict)

    def _live_process(self) -> subprocess.Popen[str]:
        """Return the process; start one if there is none or it has ended."""
        if self.process is None or self.process.poll() is not None:
            process = self.process = subprocess.Popen(  # noqa: S603 - our own module
                module_command(_CHILD),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # It reads a model's text, so it gets none of the worker's keys.
                env={name: each for name, each in os.environ.items() if "VCPO_" not in name},
            )
            weakref.finalize(self, _kill, process)
            if _ask(process, {"reference": "0", "candidate": "0"}, _START_S) is None:
                _kill(process)
                raise RuntimeError(
                    "the process that judges answers did not start (see the log above);"
                    " install math-verify in the rollout image: pip install 'vcpo[rollout]'"
                )
        return self.process


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], question: object, limit_s: float) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{json.dumps(question)}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    line = process.stdout.readline() if ready else ""
    return json.loads(line) if line else None
