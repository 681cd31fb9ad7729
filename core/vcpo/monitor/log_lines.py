"""Logs of the processes of a local run, as lines of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vcpo.local.run_dir import RunDir
from vcpo.records.journal import FileTail
from vcpo.service.log_line import plain_text

_POLL_S = 0.5


class UnknownPartError(Exception):
    """No process of the run has this name; the message names those that have a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a process's log."""

    process: str
    """Such as `learner` or `main-0`."""
    text: str


class LogTail:
    """Reads the lines that one log gains."""

    def __init__(self, path: Path) -> None:
        self._process = path.stem
        self._tail = FileTail(path, from_start=True)

    def read(self) -> list[LogLine]:
        """Return the whole lines since the last call; JSON lines as text."""
        lines = self._tail.read().decode(errors="replace")
        if not lines:
            return []
        text = plain_text(lines.removesuffix("\n"))
        return [LogLine(process=self._process, text=line) for line in text.split("\n")]


def log_files(run_dir: Path, part: str | None) -> list[Path]:
    """Return the logs of a run, or of one part: a process, or the workers of a rollout group.

    Raises: UnknownPartError naming the processes that have a log.
    """
    logs = sorted(RunDir(run_dir).logs.glob("*.log"))
    if part is None:
        return logs
    chosen = [log for log in logs if log.stem == part or log.stem.rpartition("-")[0] == part]
    if not chosen:
        known = ", ".join(log.stem for log in logs) or "none yet"
        raise UnknownPartError(f"--part: no process '{part}' has a log; those that have: {known}")
    return chosen


def follow_logs(
    run_dir: Path,
    part: str | None,
    *,
    tail: int | None,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Iterator[LogLine]:
    """Yield the lines of the logs; then those that come, also of new processes, until the end.

    tail: how many of each log's last lines to begin with; None is all.
    is_over: whether nothing more is to be waited for.
    """
    tails: dict[Path, LogTail] = {}
    while True:
        ends = is_over()
        for path in log_files(run_dir, part):
            is_new = path not in tails
            lines = tails.setdefault(path, LogTail(path)).read()
            if is_new and tail is not None:
                lines = lines[max(0, len(lines) - tail) :]
            yield from lines
        if ends:
            return
        sleep(_POLL_S)
