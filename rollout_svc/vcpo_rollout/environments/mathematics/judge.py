"""Compares mathematical expressions within a time limit, from whatever thread asks.

The work is done by a process beside this one (`math_judge_process`); one that does not answer in
time is ended, the answer counts as wrong, and the next question begins a new one.
"""

import json
import select
import subprocess
import sys
import threading
import weakref
from typing import Final

MAX_CHARACTERS: Final = 1024
"""Longest expression that is looked at."""

_START_S: Final = 60.0
"""Time for a new process to import what it needs, on a busy machine."""

_CHILD: Final = "vcpo_rollout.environments.mathematics.judge_process"


class MathJudge:
    """Says whether two expressions mean the same; one process, one question at a time.

    limit_s: Time for one question; no answer within it is a no.
    """

    def __init__(self, limit_s: float = 10.0) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, reference: str, answer: str) -> bool:
        """Whether `answer` means what `reference` does; both LaTeX or plain numbers.

        Raises:
            RuntimeError: when no process can be started, for the lack of math-verify.
        """
        if answer == reference:
            return True
        if not 0 < len(answer) <= MAX_CHARACTERS:
            return False
        question = json.dumps({"reference": reference, "answer": answer})
        with self._lock:
            process = self._running()
            verdict = _ask(process, question, self._limit_s)
            if verdict is None:
                _end(process)
        return verdict or False

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            process = self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            weakref.finalize(self, _end, process)
            if _ask(process, json.dumps({"reference": "0", "answer": "0"}), _START_S) is None:
                _end(process)
                raise RuntimeError(
                    "the process that compares mathematics did not start (see the log above); "
                    "install math-verify in the rollout image: pip install 'vcpo[rollout]'"
                )
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], question: str, limit_s: float) -> bool | None:
    """What the process says; None when it says nothing in time or is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    line = process.stdout.readline() if ready else ""
    return bool(json.loads(line)) if line else None
