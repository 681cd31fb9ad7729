"""Judges in a process of their own, one question at a time, each within a time limit.

What compares or evaluates a model's text may compute for ever or use all memory for a few
characters. So a child process does it: it reads a JSON question per line and writes a JSON verdict
per line. If it does not respond in time, it is killed, and the next question starts a new process.
"""

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

_START_S: Final = 180.0
"""Time for a new process to import its modules, on a busy machine."""


class ChildJudge:
    """One such process; any thread may ask it.

    module: that the process runs, with `arguments`.
    limit_s: Time for one question.
    first: A question that every process of this kind answers; a new one must within three minutes.
    cure: What to install where it does not.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        limit_s: float,
        first: object,
        cure: str,
    ) -> None:
        self.process: subprocess.Popen[str] | None = None
        """The judge's process; None before the first question."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._limit_s = limit_s
        self._first = first
        self._cure = cure
        self._lock = threading.Lock()

    def ask(self, question: object) -> Any:
        """Return the verdict, never None; None if it did not come in time, or the process ended.

        Raises:
            RuntimeError: when the process does not start.
        """
        with self._lock:
            process = self._live_process()
            verdict = _ask(process, question, self._limit_s)
            if verdict is None:
                _kill(process)
        return verdict

    def _live_process(self) -> subprocess.Popen[str]:
        """Return the process; start one if there is none or it has ended."""
        if self.process is None or self.process.poll() is not None:
            process = self.process = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # It reads a model's text, so it gets none of the worker's keys.
                env={name: each for name, each in os.environ.items() if "VCPO_" not in name},
            )
            weakref.finalize(self, _kill, process)
            if _ask(process, self._first, _START_S) is None:
                _kill(process)
                raise RuntimeError(
                    "the process that judges answers did not start (see the log above);"
                    f" {self._cure}"
                )
        return self.process


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], question: object, limit_s: float) -> Any:
    """Return the process's verdict; None if it does not respond in time or has ended."""
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
