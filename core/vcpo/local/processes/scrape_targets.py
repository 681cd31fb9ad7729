"""The file from which a Prometheus learns where the processes of a local run serve their metrics.

Its format is that of `file_sd_configs`: https://prometheus.io/docs/prometheus/latest/configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """A process of this machine that serves `/metrics`."""

    pod: str
    """Name of the process; in a cluster the label `pod` holds the name of its pod."""
    part: str
    """`learner`, `rollout` or `host`."""
    port: int
    """Port on the loopback address."""


def target_groups(run: str, targets: Sequence[ScrapeTarget]) -> list[dict[str, object]]:
    """Return the content of the file: one group for each process, since labels are a group's.

    run: name of the run's directory.

    There is no label `namespace`: for Prometheus that is the empty namespace of local runs.
    """
    return [
        {
            "targets": [f"127.0.0.1:{target.port}"],
            "labels": {"run": run, "pod": target.pod, "part": target.part},
        }
        for target in targets
    ]


class ScrapeTargetFile:
    """Keeps the file equal to the processes that serve; without any there is no file."""

    def __init__(self, path: Path, *, run: str) -> None:
        self.path = path
        self._run = run
        self._written: str | None = None

    def write(self, targets: Sequence[ScrapeTarget]) -> None:
        """Replace the file if the targets differ from those written last.

        Raises:
            OSError: if the disk refuses it; the next call tries again.
        """
        if not targets:
            self.path.unlink(missing_ok=True)
            self._written = None
            return
        text = json.dumps(target_groups(self._run, targets), indent=1) + "\n"
        if text == self._written:
            return
        # Renaming: Prometheus never reads half a file.
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)
        self._written = text
