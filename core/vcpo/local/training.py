"""A run that a program or a notebook starts and follows: `vcpo.train`.

The run is the command `vcpo run` in a process of its own. So it has the command's checks and its
host, signals and the modes of files are not the program's, and a program that computes in the
meantime delays nothing.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from vcpo.api import load_run
from vcpo.local.run_dir import new_run_dir
from vcpo.local.terminal.summary import Ending, run_summary
from vcpo.records.journal import MetricsTail, read_metrics
from vcpo.records.step_record import StepRecord
from vcpo.service.process import module_command

_POLL_S = 0.1
_WARNING = "warning: "
_MAX_SAID_BYTES = 1 << 20


class TrainingError(RuntimeError):
    """What `vcpo run` says of a run that cannot start, failed, or did not improve its model."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Training:
    """A run at work: iterates over its steps as they are taken, each number once.

    Whoever closes or forgets it before the last step, or presses Ctrl-C, has the run finish its
    step and save a checkpoint; with a second Ctrl-C it ends at once.
    """

    def __init__(
        self, file: Path, changes: Mapping[str, object], run_dir: Path | None, *, resume: bool
    ) -> None:
        if resume and run_dir is None:
            raise ValueError("resume: needs run_dir, the directory of the run to resume")
        # A value in JSON is the same value in YAML.
        given = [f"{field}={json.dumps(value, default=str)}" for field, value in changes.items()]
        name = load_run(file, given).metadata.name
        self.run_dir = new_run_dir(name, Path("runs")).path if run_dir is None else run_dir
        taken = read_metrics(self.run_dir).steps if resume else ()
        self._last_step = taken[-1].step if taken else 0
        self._tail = MetricsTail(self.run_dir, from_start=not resume)
        self._steps: deque[StepRecord] = deque()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._has_warned = False
        command = module_command("vcpo.cli.main", "run", str(file), "--until-input-ends")
        command += [f"--run-dir={self.run_dir}", *(f"--set={change}" for change in given)]
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            command + ["--resume"] * resume,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
        ends = (self._process, self._errors)
        self._finalizer = weakref.finalize(self, _forget, self.run_dir, *ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepRecord:
        """Wait for the next step.

        Raises:
            TrainingError: if the run ends otherwise than with its last step or by `close`.
        """
        try:
            while not self._steps:
                has_ended = self._process.poll() is not None
                self._read_steps()
                if has_ended and not self._steps:
                    self._check_end()
                    raise StopIteration
                if not self._steps:
                    time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self.close()
            raise
        self._warn()
        return self._steps.popleft()

    def wait(self) -> dict[str, Any]:
        """Wait for the end of the run; return what `vcpo run --json` prints.

        Raises:
            TrainingError: as iterating does.
        """
        for _ in self:
            pass
        is_whole = self._process.returncode == Ending.COMPLETE
        return run_summary(self.run_dir, Ending.COMPLETE if is_whole else Ending.INTERRUPTED)

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            _end(self._process, self._errors)

    def _read_steps(self) -> None:
        for step in self._tail.read().steps:
            if step.step > self._last_step:  # else a restarted learner took it again
                self._steps.append(step)
                self._last_step = step.step

    def _check_end(self) -> None:
        self._warn()
        status = self._process.returncode
        if status != Ending.COMPLETE and self._finalizer.alive:  # nobody closed it
            said = [line for line in self._said() if not line.startswith(_WARNING)]
            raise TrainingError("\n".join(said) or f"`vcpo run` ended with status {status}", status)

    def _warn(self) -> None:
        """Pass on, once, what the command warned of before the first step."""
        if not self._has_warned:
            self._has_warned = True
            for line in self._said():
                if line.startswith(_WARNING):
                    warnings.warn(line.removeprefix(_WARNING), stacklevel=3)

    def _said(self) -> list[str]:
        if self._errors.closed:
            return []
        # The command writes where the file's position is, which reading must not move.
        return os.pread(self._errors.fileno(), _MAX_SAID_BYTES, 0).decode().splitlines()


def _forget(run_dir: Path, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a run that nobody waited for, and say so if it was at work."""
    if process.poll() is None:
        what = f"vcpo.train: the program ended before its run did, which is interrupted ({run_dir})"
        warnings.warn(f"{what}; call wait(), or iterate over the steps", stacklevel=2)
    _end(process, errors)


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a run as Ctrl-C does in a terminal, and wait; a further Ctrl-C is passed on.

    The end of its input counts as the first one. Unlike a signal it is not lost on a process that
    has just begun, or that inherits SIGINT ignored, as what a script starts with `&` does.
    """
    assert process.stdin is not None  # it is a pipe
    process.stdin.close()
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(number)
    process.wait()
    errors.close()
