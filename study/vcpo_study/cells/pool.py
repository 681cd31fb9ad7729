"""Cells in parallel: one process each, so that one that dies takes nobody along.

Processes are forked from a server that has loaded the tensor libraries once, which saves seconds
for each cell. A cell that is stopped leaves nothing behind; one that ends has written its file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from vcpo_study.cells.cell import Cell

Task = Callable[[Cell], None]
"""What a process does with its cell; a function of a module, or a partial of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a cell's process ended."""

    cell: Cell
    error: str | None
    """The end of its traceback, or how it died; None when all went well."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    cell: Cell
    process: ForkServerProcess
    complaints: Connection

    def outcome(self) -> Outcome:
        self.process.join()
        error = self._complaint()
        code = self.process.exitcode
        if error is None and code != 0:
            error = f"the process ended with status {code}"
        return Outcome(cell=self.cell, error=error)

    def _complaint(self) -> str | None:
        with self.complaints, contextlib.suppress(EOFError):
            return str(self.complaints.recv()) if self.complaints.poll() else None
        return None


def run_cells(cells: Sequence[Cell], task: Task, *, jobs: int) -> Generator[Outcome, None, None]:
    """Run cells, at most `jobs` at a time; yields each as it ends.

    Whoever stops listening (closes the generator) stops the cells under way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vcpo_study.cells.experiment"])
    waiting = deque(cells)
    running: dict[int, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = _start(context, waiting.popleft(), task)
                running[started.process.sentinel] = started
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                yield running.pop(sentinel).outcome()
    finally:
        for each in running.values():
            each.process.terminate()
        for each in running.values():
            each.process.join()


def _start(context: multiprocessing.context.ForkServerContext, cell: Cell, task: Task) -> _Running:
    complaints, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(cell, task, sender), name=cell.name)
    process.start()
    sender.close()
    return _Running(cell=cell, process=process, complaints=complaints)


def _work(cell: Cell, task: Task, complaints: Connection) -> None:
    # Ctrl-C reaches the whole group; it is for the parent to decide what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task(cell)
    # Whatever went wrong in one cell must reach the report, and not end the study.
    except Exception:  # noqa: BLE001
        complaints.send(traceback.format_exc(limit=-3))
        raise SystemExit(1) from None
