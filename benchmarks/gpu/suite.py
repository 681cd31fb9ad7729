"""The checks in their order, and how one runs: in a process of its own, up to a time limit."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.gpu.setting import Figures, Setting

# The parent never touches the device, so that a fork can.
_CONTEXT = multiprocessing.get_context("fork")
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question."""

    number: int
    name: str
    place: str
    """MODULE:FUNCTION, imported where it runs."""

    def load(self) -> Callable[[Setting], Figures]:
        """Import the function."""
        module, _, function = self.place.partition(":")
        found: Callable[[Setting], Figures] = getattr(importlib.import_module(module), function)
        return found


_PLACES = (
    ("norm_products", "norm_forms:norm_products"),
    ("output_head", "head:output_head"),
    ("step_speed", "steps:step_speed"),
    ("step_beside_trl", "steps:step_beside_trl"),
    ("attention", "steps:attention"),
    ("longest_trajectory", "steps:longest_trajectory"),
    ("break_even", "norm_forms:break_even"),
    ("sharded_step", "sharding:sharded_step"),
    ("publishing", "publishing:publishing"),
    ("swap_pauses", "sampling:swap_pauses"),
    ("sampler_against_learner", "sampling:sampler_against_learner"),
    ("whole_run", "end_to_end:whole_run"),
)
CHECKS: Final = tuple(
    Check(number=number, name=name, place=f"benchmarks.gpu.{place}")
    for number, (name, place) in enumerate(_PLACES, start=1)
)
"""In the order of their weight: a run that is cut short has answered the first ones."""

ENVIRONMENT: Final = Check(
    number=0, name="environment", place="benchmarks.gpu.environment:environment"
)
"""What the machine has; it runs apart as well, as it touches the device."""


def run_apart(check: Check, setting: Setting, limit_s: float) -> dict[str, Any]:
    """Run a check in a process of its own; return its line, complete or as far as it came.

    limit_s: after this many seconds the process and its children are killed.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_report, args=(sender, check, setting))
    started_s = time.monotonic()
    process.start()
    sender.close()
    line: dict[str, Any] = {"check": check.number, "name": check.name}
    stopped = _receive(receiver, line, deadline_s=started_s + limit_s)
    if stopped is None:
        process.join(_GRACE_S)
    else:
        line["stopped"] = stopped
    _kill(process)
    return line | {"seconds": round(time.monotonic() - started_s, 1)}


def _receive(receiver: Connection, line: dict[str, Any], *, deadline_s: float) -> str | None:
    """Add the parts that arrive to the line; return why it is incomplete, if it is."""
    while receiver.poll(max(0.0, deadline_s - time.monotonic())):
        try:
            part: Mapping[str, Any] | None = receiver.recv()
        except EOFError:
            return "its process ended; see above"
        if part is None:
            return None
        line |= part
    return "time limit"


def _report(sender: Connection, check: Check, setting: Setting) -> None:
    os.setsid()
    # Libraries log to the standard output, where the lines of the suite are.
    os.dup2(2, 1)
    try:
        for part in check.load()(setting):
            sender.send(part)
    except Exception as error:  # noqa: BLE001 - the other checks go on
        sender.send({"error": f"{type(error).__name__}: {error}"})
    sender.send(None)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and all that it started."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
