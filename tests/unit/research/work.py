"""What the processes of the pool's tests do."""

import os
import signal
import time
from pathlib import Path

from research.cells.cell import Cell


def leave_a_file(folder: Path, cell: Cell) -> None:
    (folder / cell.name).touch()


def complain(cell: Cell) -> None:
    raise ValueError(f"no luck with seed {cell.seed}")


def die(cell: Cell) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_for_seed_1(folder: Path, cell: Cell) -> None:
    (complain if cell.seed == 1 else lambda each: leave_a_file(folder, each))(cell)


def leave_a_file_and_stay(folder: Path, cell: Cell) -> None:
    leave_a_file(folder, cell)
    if cell.seed == 2:
        time.sleep(3600)
