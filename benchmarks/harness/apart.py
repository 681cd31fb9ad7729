"""Work in a process of its own: a crash, an error or a hang costs its own result only."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

# The caller never touches a device and runs no thread, so that a fork can do both.
_CONTEXT = multiprocessing.get_context("fork")
_GRACE_S = 5.0


def said_apart(module: str, *arguments: str) -> Any:
    """Run a module in an interpreter of its own; return the JSON of the last line that it prints.

    Raises: subprocess.CalledProcessError.
    """
    command = [sys.executable, "-m", module, *arguments]
    print(f"{' '.join(command[1:])}, in a process of its own", flush=True)
    # Our own module, by our own interpreter.
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    return json.loads(output.splitlines()[-1])


Parts = Iterable[Mapping[str, Any]]
"""What some work finds, bit by bit."""


def run_apart(
    work: Callable[[], Parts],
    limit_s: float,
    tell: Callable[[Mapping[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Run work in a fork of this process; return what it found, all of it or as far as it came.

    The result has `seconds`; `error` if the work raised one, and `stopped` if its process ended or
    the time was up.

    limit_s: after this many seconds the process and its children are killed.
    tell: is called with each part as soon as it arrives.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_report, args=(sender, work))
    started_s = time.monotonic()
    process.start()
    sender.close()
    found: dict[str, Any] = {}
    stopped = _receive(receiver, found, tell, deadline_s=started_s + limit_s)
    if stopped is None:
        process.join(_GRACE_S)
    else:
        found["stopped"] = stopped
    _kill(process)
    return found | {"seconds": round(time.monotonic() - started_s, 1)}


def _receive(
    receiver: Connection,
    found: dict[str, Any],
    tell: Callable[[Mapping[str, Any]], object],
    *,
    deadline_s: float,
) -> str | None:
    """Add the parts that arrive; return why they are incomplete, if they are."""
    while receiver.poll(max(0.0, deadline_s - time.monotonic())):
        try:
            part: Mapping[str, Any] | None = receiver.recv()
        except EOFError:
            return "its process ended; see above"
        if part is None:
            return None
        found |= part
        tell(part)
    return "time limit"


def _report(sender: Connection, work: Callable[[], Parts]) -> None:
    os.setsid()
    # Libraries log to the standard output, where the lines of the benchmark are.
    os.dup2(2, 1)
    try:
        for part in work():
            sender.send(part)
    except Exception as error:  # noqa: BLE001 - other work goes on
        sender.send({"error": f"{type(error).__name__}: {error}"})
    sender.send(None)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and all that it started."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it has not come to make a group of its own
    process.join()
