"""The directory of a local run.

```
spec.yaml      the run with every default filled in
metrics.jsonl  steps and evaluations         events.jsonl   events
checkpoints/   checkpoints to resume from    model/         the trained model, at the end
redo-log/      what was accepted since the oldest of them
logs/          one log per process           report.html    the report
samples/       a few responses of some steps and evaluations
processes/     ports of each process         *.lock         locks of host and learner
adapters/      LoRA adapters, if trained     exports/       output of `vcpo export`
```
"""

import contextlib
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from vcpo.api import SpecError, VCPORun, load_run, run_to_yaml
from vcpo.records.journal import METRICS_FILE
from vcpo.service.run_lock import LockHolder

_MAX_RUNS = 10_000


class RunDir:
    """Paths in a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.yaml"
        self._partial_spec = path / "spec.partial"
        self.logs = path / "logs"
        self.processes = path / "processes"
        self.model = path / "model"

    @property
    def is_used(self) -> bool:
        return self.spec.exists() or (self.path / METRICS_FILE).exists()

    @property
    def has_run(self) -> bool:
        return self.spec.exists()

    @property
    def newest_checkpoint_step(self) -> int | None:
        """Step of the newest checkpoint, whose files are not compared with its sums; None: none."""
        manifests = (self.path / "checkpoints").glob("step-*/meta.json")
        numbers = (manifest.parent.name.removeprefix("step-") for manifest in manifests)
        return max((int(number) for number in numbers if number.isdecimal()), default=None)

    def create(self, run: VCPORun) -> None:
        """Create the directory and write spec.yaml; a run that goes on keeps the day it began."""
        for folder in (self.path, self.logs, self.processes):
            folder.mkdir(parents=True, exist_ok=True)
        for stale in self.processes.iterdir():
            stale.unlink()
        # Renaming keeps the existing file if the disk is full.
        dated = run.begun_on(self._start_date())
        self._partial_spec.write_text(run_to_yaml(dated), encoding="utf-8")
        self._partial_spec.replace(self.spec)

    def _start_date(self) -> date:
        with contextlib.suppress(SpecError):
            if self.has_run and (day := load_run(self.spec).start_date) is not None:
                return day
        return datetime.now(UTC).date()

    @property
    def missing_folders(self) -> list[Path]:
        here = self.path.absolute()
        return [each for each in (here, *here.parents) if not each.exists()]

    def remove_unused(self, made: Sequence[Path]) -> None:
        """Remove what the start of a run left if it recorded no run; foreign files stay.

        made: `missing_folders` before the start.
        """
        if self.is_used:
            return
        lock = self.path / f"{LockHolder.HOST}.lock"
        removals = [self._partial_spec.unlink, lock.unlink, self.logs.rmdir, self.processes.rmdir]
        for remove in [*removals, *(each.rmdir for each in made)]:
            with contextlib.suppress(OSError):  # it is not there, or holds something else
                remove()

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def ready_file(self, process: str) -> Path:
        return self.processes / f"{process}.json"


def new_run_dir(name: str, parent: Path) -> RunDir:
    """Return the first unused directory of `<parent>/<name>-001`, `-002` and so on.

    Raises: FileExistsError if all are used.
    """
    for number in range(1, _MAX_RUNS):
        candidate = RunDir(parent / f"{name}-{number:03d}")
        if not candidate.path.exists():
            return candidate
    raise FileExistsError(f"{parent}: has {_MAX_RUNS} runs of {name}; remove some")
