"""The screen of `vcpo top`: a table of runs, and the panel of the run that is opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from vcpo.local.terminal.panel import GRADE_STYLES, RunPanel
from vcpo.local.terminal.run_view import printable
from vcpo.monitor.local_run import LocalRuns
from vcpo.monitor.run_row import RunRow, runs_table

_POLL_S = 2.0
_UP, _DOWN, _ENTER, _BACK, _QUIT = "up", "down", "enter", "back", "quit"
_KEYS = {
    b"\x1b[A": _UP,
    b"\x1bOA": _UP,
    b"k": _UP,
    b"\x1b[B": _DOWN,
    b"\x1bOB": _DOWN,
    b"j": _DOWN,
    b"\r": _ENTER,
    b"\n": _ENTER,
    b"\x1b": _BACK,
    b"\x7f": _BACK,
    b"h": _BACK,
    b"q": _QUIT,
    b"\x03": _QUIT,
}
"""Meaning of each key, by the bytes that a terminal sends."""
_TABLE_HELP = "up/down choose · enter opens · q ends"
_PANEL_HELP = "esc goes back · q ends"


class TopScreen:
    """What is chosen and what is opened; it takes rows and keys, and returns what to draw."""

    def __init__(self) -> None:
        self.opened: str | None = None
        """Place of the run whose panel is shown; None shows the table."""
        self.is_over = False
        """Whether the user has ended it."""
        self._rows: Sequence[RunRow] = ()
        self._chosen: str | None = None
        self._panels: dict[str, RunPanel] = {}

    def update(self, rows: Sequence[RunRow]) -> None:
        """Take the runs as they are now; the choice stays with its run."""
        self._rows = rows
        places = [row.place for row in rows]
        if self._chosen not in places:
            self._chosen = places[0] if places else None
        if self.opened not in places:
            self.opened = None
        for row in rows:
            self._panels.setdefault(row.place, RunPanel()).update(row.view)

    def show_events(self, lines: Sequence[str]) -> None:
        """Show new events of the opened run."""
        if self.opened is not None:
            for line in lines:
                self._panels[self.opened].event(line)

    def press(self, key: bytes) -> None:
        """React to a key."""
        match _KEYS.get(key):
            case "quit":
                self.is_over = True
            case "enter":
                self.opened = self.opened or self._chosen
            case "back":
                self.opened = None
            case "up":
                self._move(-1)
            case "down":
                self._move(1)

    def render(self, *, width: int, notice: str = "") -> RenderableType:
        """Return the screen.

        width: characters of a line.
        notice: which directories cannot be read; empty if all can.
        """
        warning = [Text(notice, "bold red")] if notice else []
        if self.opened is not None:
            return Group(self._panels[self.opened].render(), *warning, Text(_PANEL_HELP, "dim"))
        if not self._rows:
            return Group(Text("no runs yet", "dim"), *warning, Text("q ends", "dim"))
        table = runs_table(self._rows, width=width, chosen=self._index())
        chosen = self._rows[self._index()].view.verdict
        matter = Text(printable(str(chosen)), GRADE_STYLES[chosen.grade])
        return Group(table, matter, *warning, Text(_TABLE_HELP, "dim"))

    def _move(self, by: int) -> None:
        if self._rows:
            index = min(len(self._rows) - 1, max(0, self._index() + by))
            self._chosen = self._rows[index].place
            if self.opened is not None:
                self.opened = self._chosen

    def _index(self) -> int:
        return next(i for i, row in enumerate(self._rows) if row.place == self._chosen)


async def show_top(runs: LocalRuns, console: Console) -> None:
    """Show runs, and react to keys, until the user ends it."""
    screen, keys = TopScreen(), asyncio.Queue[bytes]()
    with (
        Live(console=console, screen=True, auto_refresh=False) as live,
        _raw_keys(keys),
    ):
        async for _ in _turns(keys, screen):
            if not _:
                screen.update(await runs.rows())
            if screen.opened is not None:
                screen.show_events(runs.new_events(screen.opened))
            live.update(screen.render(width=console.width, notice=runs.notice()), refresh=True)


async def _turns(keys: asyncio.Queue[bytes], screen: TopScreen) -> AsyncIterator[bool]:
    """Yield whether a key was pressed: at each key, and every two seconds, until the end."""
    loop = asyncio.get_running_loop()
    yield False
    due_s = loop.time() + _POLL_S
    while not screen.is_over:
        try:
            async with asyncio.timeout_at(due_s):
                screen.press(await keys.get())
        except TimeoutError:
            yield False
            due_s = loop.time() + _POLL_S
        else:
            yield True


@contextlib.contextmanager
def _raw_keys(keys: asyncio.Queue[bytes]) -> Iterator[None]:
    """Put the keys that are pressed into a queue; the terminal echoes none of them."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: keys.put_nowait(os.read(descriptor, 16)))
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
