"""What every command of `vcpo` shares: its two consoles, and how it refuses a user's input."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from vcpo.local.preflight import missing_packages
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.run_view import printable


class _CleanConsole(Console):
    """Prints lines without control characters, whoever wrote them: no text steers a terminal."""

    def print(self, *lines: Any, **settings: Any) -> None:
        super().print(*map(_clean, lines), **settings)


def _clean(line: Any) -> Any:
    if isinstance(line, Text):
        cleaned = line.copy()
        cleaned.plain = _clean(line.plain)  # as many letters, so styles keep their places
        return cleaned
    return "\n".join(map(printable, line.split("\n"))) if isinstance(line, str) else line


OUT = _CleanConsole()
"""Results."""
ERR = _CleanConsole(stderr=True)
"""Warnings and errors."""
USER_ERROR = 2
"""Exit status when an option, a file or this machine must be fixed first."""


def say(line: str) -> None:
    """Print a result; brackets in it are no markup."""
    OUT.print(line, soft_wrap=True, markup=False, highlight=False)


def tell(line: str, style: str = "") -> None:
    """Print a warning or an error."""
    ERR.print(line, style=style, soft_wrap=True, markup=False, highlight=False)


def fail(message: str) -> NoReturn:
    """Print an error that the user can fix, and exit."""
    tell(message, "red")
    raise typer.Exit(USER_ERROR)


def require_run(run_dir: Path) -> None:
    """Exit if a directory has no run, or one that this user may not read."""
    with reading("RUN_DIR", run_dir):
        if not RunDir(run_dir).has_run:
            fail(f"RUN_DIR: {run_dir} has no run; give the directory that `vcpo run` printed")


def require_modules(modules: Sequence[str]) -> None:
    """Exit if a package that a command needs is not installed."""
    if told := missing_packages(modules):
        fail(told)


@contextlib.contextmanager
def reading(option: str, run_dir: Path) -> Iterator[None]:
    """Report an OSError of the enclosed code, which looks into a run directory."""
    try:
        yield
    except OSError as error:
        why = f"{option}: {run_dir} cannot be read ({error.strerror or error})"
        fail(f"{why}; a run directory is for the user who started the run: ask for a copy")


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Report an OSError of the enclosed code, which writes to a path that the user gave."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        fail(f"{option}: {path} cannot be written ({reason}); give a writable directory")
