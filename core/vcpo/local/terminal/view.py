"""The live view of `vcpo run`: a panel on a terminal, plain lines otherwise.

The caller passes a `RunView` at every turn, and the view decides what to print. A view prints only
through its console.
"""

from __future__ import annotations

import errno
import math
import os
import termios
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vcpo.local.terminal.panel import RunPanel, numbers_of
from vcpo.local.terminal.run_view import RunView, age_notices, drain_notices, printable
from vcpo.report.numbers import duration

PLAIN_INTERVAL_S = 5.0
"""Shortest time between two lines of the plain view while phase and accuracy do not change."""


def make_view(console: Console) -> LiveView:
    """Return the panel for a capable UTF-8 terminal, otherwise plain lines."""
    is_utf8 = console.encoding.lower().startswith("utf")
    if console.is_terminal and not console.is_dumb_terminal and is_utf8:
        return RichView(console)
    return PlainView(console)


class RichView:
    """A panel that is redrawn in place at every update."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._panel = RunPanel()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, view: RunView) -> None:
        self._panel.update(view)
        self._live.update(self._panel.render(self._live.console.width), refresh=True)

    def event(self, message: str) -> None:
        self._panel.event(message)
        self._live.update(self._panel.render(self._live.console.width), refresh=True)


class PlainView:
    """One line every few seconds, for logs and pipes; ASCII only."""

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._console = console
        self._clock = clock
        self._interval_s = interval_s
        self._printed_at_s = -math.inf
        self._printed: RunView | None = None
        self._latest: RunView | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._latest is not None and self._latest != self._printed:
            self._print_latest(self._latest)

    def update(self, view: RunView) -> None:
        self._latest = view
        waited_s = self._clock() - self._printed_at_s
        before = self._printed
        has_changed = before is None or (
            (before.phase, before.signals.accuracy) != (view.phase, view.signals.accuracy)
        )
        if has_changed or waited_s >= self._interval_s:
            self._print_latest(view)

    def event(self, message: str) -> None:
        self._write(f"* {printable(message)}")

    def _print_latest(self, view: RunView) -> None:
        self._printed = view
        self._printed_at_s = self._clock()
        self._write(plain_line(view))

    def _write(self, line: str) -> None:
        text = line.encode("ascii", errors="replace").decode("ascii")
        self._console.print(Text(text), soft_wrap=True)


LiveView = RichView | PlainView
"""Shows the progress of a run; a context manager around all updates."""


def leave_lost_terminal() -> None:
    """Let what is printed from now on go nowhere if the terminal is gone; else a write would fail.

    Files and pipes stay.
    """
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def plain_line(view: RunView) -> str:
    """Return the state of a run in one line."""
    facts = [
        f"{view.phase} {view.signals.step}/{view.run.spec.steps}",
        *(f"{label} {value}" for label, (value, _) in numbers_of(view).items()),
        f"elapsed {duration(view.elapsed_s)}",
        f"eta {duration(view.eta_s)}",
        *age_notices(view),
        *drain_notices(view),
    ]
    return "  ".join(facts)
