"""The command line of every rank of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, see `python -m vcpo_learner --help`."""

    run_file: Path
    run_dir: Path
    listen: str
    metrics_listen: str
    resume: bool
    drain_s: float
    linger_s: float
    tls: Path | None
    """Folder of the certificates; None if there is none."""
    plain_text: bool
    """Whether plain text may leave this machine."""
    health_listen: str | None
    ready_file: Path | None
    exit_with_parent: bool
