"""What a process died of: its exit code in words, and the line of its log that says why."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from vcpo.service.lifecycle import START_ERROR_MARK

_MAX_CAUSE_CHARACTERS = 500
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROGRESS_BAR = re.compile(r"\d%\|.*\||\d+/\d+ \[\d+:\d\d")
_HEADS = (
    "Traceback (most recent call last):",
    "Exception Group Traceback (most recent call last):",
)
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|ExceptionGroup|Exit|Interrupt)(:|$)")
_IGNORED = "Exception ignored"
"""How Python begins to tell of an exception that ended nothing, mostly at the end of a process."""
_GROUP_RULE = re.compile(r"\s*\+[+-]*-{4}.*")
"""What parts the exceptions of a group from each other."""
_GROUP_MARGIN = re.compile(r"^\s+[|+] ")
"""What stands left of every other line of a group."""


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

    That is what it said the user must put right; else the exception of its last traceback, of a
    group what is in it, even where the log begins amid its frames; else the last line that is no
    progress bar; empty when there is none.
    """
    _, mark, complaint = log.rpartition(START_ERROR_MARK)
    if mark:
        return _one_line(complaint)
    lines = _meaningful_lines(log)
    told = _without_ignored(lines) or lines
    cause = _exception(told[_last_traceback(told) :])
    return _one_line(cause or (told[-1] if told else ""))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    is_long = len(line) > _MAX_CAUSE_CHARACTERS
    return f"{line[: _MAX_CAUSE_CHARACTERS - 3]}..." if is_long else line


def _meaningful_lines(log: str) -> list[str]:
    """Lines as a terminal shows them in the end, without blank ones and progress bars."""
    # A progress bar returns to the start of its line and writes over itself.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in _ESCAPE.sub("", log).split("\n")]
    plain = [_GROUP_MARGIN.sub("", line) for line in shown if not _GROUP_RULE.fullmatch(line)]
    return [line for line in plain if line.strip() and not _PROGRESS_BAR.search(line)]


def _without_ignored(lines: Sequence[str]) -> list[str]:
    """Lines without the exceptions that Python ignored, and their tracebacks."""
    kept: list[str] = []
    is_head_due = is_ignored = False
    for line in lines:
        if line.startswith(_IGNORED):
            is_head_due, is_ignored = True, False
        elif is_head_due and line.strip() in _HEADS:
            is_head_due, is_ignored = False, True
        elif is_ignored:
            is_ignored = line[0].isspace()
        else:
            is_head_due = False
            kept.append(line)
    return kept


def _last_traceback(lines: Sequence[str]) -> int:
    """Index of the line behind the head of the last traceback; behind all lines without one.

    Where the log begins amid the frames, it is that of the exception.
    """
    heads = [index for index, line in enumerate(lines) if line.strip() in _HEADS]
    if heads:
        return heads[-1] + 1
    exceptions = [
        index
        for index, line in enumerate(lines)
        if index and lines[index - 1][0].isspace() and _EXCEPTION.match(line)
    ]
    return exceptions[-1] if exceptions else len(lines)


def _exception(lines: Sequence[str]) -> str:
    """The line behind the indented frames of a traceback; empty when it broke off before."""
    for index, line in enumerate(lines):
        if not line[0].isspace():
            is_whole = not line.endswith(":") or index + 1 == len(lines)
            return line if is_whole else f"{line} {lines[index + 1]}"
    return ""
