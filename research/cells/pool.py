"""Runs cells in parallel, each in a process, so that a dying cell ends no other.

A fork server has loaded the tensor libraries once, which saves seconds for each cell. A terminated
cell writes nothing; a cell that succeeds has written its file.
"""

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from research.cells.cell import Cell

Task = Callable[[Cell], None]
"""The work of a process; a function of a module, or a partial of one, so that it can be pickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a cell's process ended."""

    cell: Cell
    error: str | None
    """End of its traceback, or its exit status; None when it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    cell: Cell
    process: ForkServerProcess
    errors: Connection

    def outcome(self) -> Outcome:
        self.process.join()
        error = None
        with self.errors, contextlib.suppress(EOFError):
            if self.errors.poll():
                error = str(self.errors.recv())
        code = self.process.exitcode
        if error is None and code != 0:
            error = f"the process ended with status {code}"
        return Outcome(cell=self.cell, error=error)


def run_cells(cells: Iterable[Cell], task: Task, *, jobs: int) -> Generator[Outcome, None, None]:
    """Run cells, at most `jobs` at a time, and yield the outcome of each when it ends.

    cells: the next one is taken when there is a free process for it, so that a caller may stop
        giving cells while others run.

    Closing the generator terminates the running cells.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["research.cells.experiment"])
    waiting = iter(cells)
    running: dict[int, _Running] = {}
    try:
        while True:
            for cell in islice(waiting, jobs - len(running)):
                errors, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(cell, task, sender), name=cell.name)
                process.start()
                sender.close()
                running[process.sentinel] = _Running(cell=cell, process=process, errors=errors)
            if not running:
                return
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                yield running.pop(sentinel).outcome()
    finally:
        for each in running.values():
            each.process.terminate()
        for each in running.values():
            each.process.join()


def _work(cell: Cell, task: Task, errors: Connection) -> None:
    # Ctrl-C reaches the whole process group; the parent decides which cells end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task(cell)
    # Every error of a cell must reach the report and must not end the study.
    except Exception:  # noqa: BLE001
        errors.send(traceback.format_exc(limit=-3))
        raise SystemExit(1) from None
