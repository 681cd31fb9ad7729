"""The directory of a local run: where everything about it lies.

```
spec.yaml      the run as given, every default filled in
metrics.jsonl  steps and evaluations        events.jsonl  what happened
checkpoints/   to resume from               model/        the trained model, at the end
logs/          one per process              report.html   the report
quarantine/    groups that ended an update, if any did
processes/     where each process serves     *.lock        who works here now
adapters/      beside model/, of a run that trains them       exports/      of `vcpo export`
```
"""

from __future__ import annotations

from pathlib import Path

from vcpo.records.journal import METRICS_FILE
from vcpo.spec import VCPORun, run_to_yaml

_MAX_RUNS = 10_000


class RunDir:
    """Paths below a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.yaml"
        self.logs = path / "logs"
        self.processes = path / "processes"
        self.model = path / "model"

    @property
    def is_used(self) -> bool:
        """Whether a run has left records here."""
        return self.spec.exists() or (self.path / METRICS_FILE).exists()

    def create(self, run: VCPORun) -> None:
        """Make the directory and write the run's file."""
        for folder in (self.path, self.logs, self.processes):
            folder.mkdir(parents=True, exist_ok=True)
        for stale in self.processes.iterdir():
            stale.unlink()
        # A disk without room must not cost the file that is there.
        partial = self.spec.with_suffix(".partial")
        partial.write_text(run_to_yaml(run), encoding="utf-8")
        partial.replace(self.spec)

    def log(self, process: str) -> Path:
        """Where a process writes."""
        return self.logs / f"{process}.log"

    def ready_file(self, process: str) -> Path:
        """Where a process says that it serves."""
        return self.processes / f"{process}.json"


def new_run_dir(name: str, parent: Path) -> RunDir:
    """A directory not used before: `<parent>/<name>-001`, `-002` and so on."""
    for number in range(1, _MAX_RUNS):
        candidate = RunDir(parent / f"{name}-{number:03d}")
        if not candidate.path.exists():
            return candidate
    raise FileExistsError(f"{parent}: holds {_MAX_RUNS} runs of {name}; remove some")
