"""The log lines of a cluster's containers, read as a log store reads them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = {"time", "level", "part", "logger", "message", "run", "namespace", "pod"}
IN_PODS = {"part", "namespace", "pod"}
"""Fields of a pod's lines that are never empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """What the logs below a folder hold."""

    by_part: dict[str, int]
    """Number of lines that are JSON with every required field, by part."""
    unreadable: list[str]
    """The other lines, each with its file."""

    @classmethod
    def below(cls, root: Path) -> LogLines:
        """Read every log below a folder."""
        counts: Counter[str] = Counter()
        unreadable = []
        for log in sorted(root.rglob("*.log")):
            for line in log.read_text().splitlines():
                entry = _entry(line)
                if entry is None:
                    unreadable.append(f"{log.relative_to(root)}: {line}")
                else:
                    counts[entry["part"]] += 1
        return cls(by_part=dict(counts), unreadable=unreadable)


def _entry(line: str) -> dict[str, Any] | None:
    """Return a line as an object; None if it is none, or lacks a field."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(entry, dict) or not entry.keys() >= REQUIRED:
        return None
    is_named = entry["part"] == "operator" or all(entry[name] for name in IN_PODS)
    return entry if is_named else None
