"""How a service's process starts and ends: ready files, complaints, signals, and its parent.

A service started by the local host writes a *ready file* once it serves, which tells its addresses.
When it cannot start for a reason that the user must put right, it says so after a mark that the
host finds in its log, and ends with a status of its own; anything else that goes wrong is a bug or
bad luck, and shows its traceback. It leaves when the host does, however the host ended: it holds
the reading end of a pipe as its standard input, and the kernel closes the other end then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

TOKEN_VARIABLE = "VCPO_TOKEN"  # noqa: S105 - the variable's name, not a secret
"""Environment variable with the run's shared token; unset means that none is asked for."""

GPU_MEMORY_VARIABLE = "VCPO_GPU_MEMORY_RATIO"
"""Environment variable with the share of its GPU's memory that a service may take, in (0, 1]."""

SERVICE_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # it warns of every fork otherwise
    # Progress bars are for people who watch; in a log they hide the lines that say something.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
"""What every service is started with, by whichever host, unless its user says otherwise."""

CANNOT_START = 2
"""Exit status of a service that the user must help to start; starting it again is no cure."""

DRAINED = os.EX_TEMPFAIL
"""Exit status of a local run's learner that was asked to leave before the last step. In a cluster
it is 0: a pod that leaves when it is told to has not failed."""

START_ERROR_MARK = "vcpo: cannot start: "
"""Stands before what the user must put right, in a service's log."""

_MAX_PORT = 65_535


class StartError(Exception):
    """Something that the user must put right before a service can start."""


def gpu_memory_ratio() -> float | None:
    """The share of its GPU's memory that this process may take; None is no limit.

    Raises:
        ValueError: naming the variable, when it holds something else.
    """
    given = os.environ.get(GPU_MEMORY_VARIABLE)
    if given is None:
        return None
    with contextlib.suppress(ValueError):
        if 0.0 < float(given) <= 1.0:
            return float(given)
    raise ValueError(f"{GPU_MEMORY_VARIABLE}: must be a share in (0, 1], got {given!r}")


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """Around whatever depends on files, addresses and settings that the user gave.

    Raises:
        StartError: for an OSError or ValueError, with its text.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error


def report_start_error(error: StartError) -> int:
    """Say what the user must put right; returns the exit status."""
    with contextlib.suppress(OSError):  # a log on a full disk does not change the status
        sys.stderr.write(f"{START_ERROR_MARK}{error}\n")
    return CANNOT_START


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Where a service that has started can be reached."""

    pid: int
    grpc_port: int
    metrics_port: int


def write_ready(path: Path, ready: Ready) -> None:
    """Write the ready file in one piece."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(ready)) + "\n")
    partial.replace(path)


def read_ready(path: Path) -> Ready | None:
    """Read a ready file; None while there is none."""
    try:
        return Ready(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def on_stop_request(stop: Callable[[str], None]) -> None:
    """Call `stop` with a reason on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)


def on_parent_exit(stop: Callable[[str], None]) -> None:
    """Call `stop` when standard input ends, that is when the process that holds it is gone."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop("the host is gone")

    loop.add_reader(descriptor, readable)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; the port is 0 (any) to 65535.

    Raises:
        ValueError: when it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"address: must be host:port, got {address!r}")
    return host, int(port)
