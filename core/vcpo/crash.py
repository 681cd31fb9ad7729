"""What a process died of: its exit code in words, and the line of its log that says why."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from vcpo.lifecycle import COMPLAINT_MARK

_MAX_CAUSE_CHARACTERS = 500
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROGRESS_BAR = re.compile(r"\d%\|.*\||\d+/\d+ \[\d+:\d\d")
_TRACEBACK = "Traceback (most recent call last):"


def describe_exit(exit_code: int) -> str:
    """Say how a process ended; negative is a signal's number, as `subprocess` has it."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def crash_cause(log: str) -> str:
    """Sum up in one line why a process died.

    That is what it said the user must put right; else the exception of its last traceback; else
    the last line that is no progress bar; empty when there is none.
    """
    _, mark, complaint = log.rpartition(COMPLAINT_MARK)
    if mark:
        return _one_line(complaint)
    lines = _meaningful_lines(log)
    starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
    cause = _exception(lines[starts[-1] + 1 :]) if starts else ""
    return _one_line(cause or (lines[-1] if lines else ""))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    is_long = len(line) > _MAX_CAUSE_CHARACTERS
    return f"{line[: _MAX_CAUSE_CHARACTERS - 3]}..." if is_long else line


def _meaningful_lines(log: str) -> list[str]:
    """Lines as a terminal shows them in the end, without blank ones and progress bars."""
    # A progress bar returns to the start of its line and writes over itself.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in _ESCAPE.sub("", log).split("\n")]
    return [line for line in shown if line.strip() and not _PROGRESS_BAR.search(line)]


def _exception(lines: Sequence[str]) -> str:
    """The line behind the indented frames of a traceback; empty when it broke off before."""
    for index, line in enumerate(lines):
        if not line[0].isspace():
            is_whole = not line.endswith(":") or index + 1 == len(lines)
            return line if is_whole else f"{line} {lines[index + 1]}"
    return ""
