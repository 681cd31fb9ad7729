"""One mistake, made with the installed command, and what came of it."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.walk.mistakes import FILE, JUDGING, MODEL, ROWS, RUN, USER_ERROR, Mistake

TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny"
PATIENCE_S = 600.0
_MARK = "VCPO_WALK"
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
"""No hub answers."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What a mistake led to."""

    mistake: Mistake
    status: int
    said: str
    seconds: float
    """Until the command ended; after Ctrl-C, since the first one."""
    left: tuple[str, ...]
    """New files and living processes."""

    @property
    def unclear(self) -> tuple[str, ...]:
        """What is wrong with the answer; empty if it is clear."""
        missing = [
            f"says nothing of {each!r}" for each in self.mistake.says if each not in self.said
        ]
        if self.status != self.mistake.status:
            missing.append(f"has status {self.status}, not {self.mistake.status}")
        if "Traceback" in self.said:
            missing.append("shows a traceback")
        return tuple(missing)


def walk(mistake: Mistake, folder: Path) -> Walked:
    """Make a mistake in an empty folder."""
    for name, text in (
        {FILE: RUN, "rows.jsonl": ROWS, "judging.py": JUDGING} | mistake.files
    ).items():
        (folder / name).write_text(text)
    shutil.copytree(TINY, folder / MODEL)
    if mistake.prepare is not None:
        mistake.prepare(folder)
    before, mark = set(folder.rglob("*")), uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [each.format(port=port) for each in mistake.command]
        started_s = time.monotonic()
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("vcpo")), *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_ENVIRONMENT, _MARK: mark},
            preexec_fn=partial(_limit, mistake.largest_file_bytes),  # noqa: PLW1509 - no threads here
            start_new_session=True,
        )
        try:
            if mistake.interrupts:
                _wait_for_step(process, folder)
                started_s = time.monotonic()
            for _ in range(mistake.interrupts):
                process.send_signal(signal.SIGINT)
                time.sleep(10 * _POLL_S)
            said, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    seconds = time.monotonic() - started_s
    return Walked(
        mistake=mistake,
        # As a shell shows it: an interrupt may come while the process ends.
        status=130 if process.returncode == -signal.SIGINT else process.returncode,
        said=said,
        seconds=seconds,
        left=(*_new_files(folder, before, mistake), *_living(mark)),
    )


def _limit(largest_file_bytes: int | None) -> None:
    if largest_file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))


def _wait_for_step(process: subprocess.Popen[str], folder: Path) -> None:
    metrics = folder / "runs" / "walk-001" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"step"' in metrics.read_text()):
        time.sleep(_POLL_S)


def _new_files(folder: Path, before: set[Path], mistake: Mistake) -> Iterator[str]:
    for path in sorted(set(folder.rglob("*")) - before):
        name = path.relative_to(folder)
        if mistake.status == USER_ERROR or name.parts[0] != "runs":
            yield str(name)


def _living(mark: str) -> Iterator[str]:
    """Yield the processes that a command started and that live."""
    wanted = f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                yield f"process {path.parent.name}"
        except OSError:  # it has ended, or is another user's
            continue
