"""Cause of a process's end: its exit code in words, and the line of its log with the cause."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from vcpo.service.lifecycle import START_ERROR_MARK
from vcpo.service.log_line import plain_text, shown_lines
from vcpo.service.logs import END_MARK

_MAX_CAUSE_CHARACTERS = 500
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROGRESS_BAR = re.compile(r"\d%\|.*\||\d+/\d+ \[\d+:\d\d")
_HEADS = (
    "Traceback (most recent call last):",
    "Exception Group Traceback (most recent call last):",
)
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|ExceptionGroup|Exit|Interrupt)(:|$)")
_IGNORED = "Exception ignored"
"""Beginning of Python's report on an exception that it ignored, mostly at a process's end."""
_GROUP_RULE = re.compile(r"\s*\+[+-]*-{4}.*")
"""Line between two exceptions of an exception group."""
_GROUP_MARGIN = re.compile(r"^\s+[|+] ")
"""Margin of every other line of an exception group."""


def describe_exit(exit_code: int) -> str:
    """Describe how a process ended; as in `subprocess`, a negative code is a signal's number."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def crash_cause(log: str) -> str:
    """Return in one line why a process died, from the end of its log, of text or of JSON.

    In this order: the start error that it reported; the first line of the end that it reported; the
    exception of its last traceback, also if the log begins within the traceback (of a group: its
    first exception); the last line that is no progress bar; an empty string.
    """
    text = plain_text(log)
    _, mark, start_error = text.rpartition(START_ERROR_MARK)
    if mark:
        return _one_line(start_error)
    _, mark, end = text.rpartition(END_MARK)
    if mark:
        return _one_line(end.partition("\n")[0])
    all_lines = _meaningful_lines(text)
    lines = _without_ignored(all_lines) or all_lines
    cause = _exception(lines[_last_traceback(lines) :])
    return _one_line(cause or (lines[-1] if lines else ""))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    is_long = len(line) > _MAX_CAUSE_CHARACTERS
    return f"{line[: _MAX_CAUSE_CHARACTERS - 3]}..." if is_long else line


def _meaningful_lines(log: str) -> list[str]:
    """Return the lines as a terminal finally shows them, without blank lines and progress bars."""
    shown = shown_lines(_ESCAPE.sub("", log))
    plain = [_GROUP_MARGIN.sub("", line) for line in shown if not _GROUP_RULE.fullmatch(line)]
    return [line for line in plain if line.strip() and not _PROGRESS_BAR.search(line)]


def _without_ignored(lines: Sequence[str]) -> list[str]:
    """Return the lines without ignored exceptions and their tracebacks."""
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
    """Return the index of the line after the head of the last traceback.

    If the log begins within the frames, return the index of the exception's line; without any
    traceback, the number of lines.
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
    """Return the line after the indented frames of a traceback; empty if the log ends before."""
    for index, line in enumerate(lines):
        if not line[0].isspace():
            is_whole = not line.endswith(":") or index + 1 == len(lines)
            return line if is_whole else f"{line} {lines[index + 1]}"
    return ""
