"""`vcpo events` and `vcpo logs`: print the records and logs in a run directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from vcpo.cli.console import OUT, fail, require_run
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import read_events
from vcpo.report.numbers import moment
from vcpo.report.recorded_run import event_rows

_STYLES: Final = {logging.ERROR: "bold red", logging.WARNING: "yellow"}

Run = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Run directory, as `vcpo run` printed it.")
]


def events(run_dir: Run) -> None:
    """Print what happened to a run: events of the host and of the learner, by time.

    Three or more of one kind in a row are one line, with the last one's words. For scripts the
    directory has events.jsonl, a line of JSON for each.
    """
    require_run(run_dir)
    for row in event_rows(sorted(read_events(run_dir), key=lambda event: event.time_unix_s)):
        event, number = row[-1], len(row)
        since = f" ({number:,} of these since {moment(row[0].time_unix_s)}Z)" if number > 1 else ""
        line = Text.assemble(
            (f"{moment(event.time_unix_s)}Z  ", "dim"),
            (f"{event.source:<8} ", "cyan"),
            (f"{event.kind:<20} ", _STYLES.get(event.level, "bold")),
            event.message + since,
        )
        OUT.print(line, soft_wrap=True)


def logs(
    run_dir: Run,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="learner, a rollout group (main) or one worker (main-0). [default: all]",
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Last lines of each log. [default: all]")
    ] = None,
) -> None:
    """Print the logs of a run's processes, each line after the name of its process."""
    require_run(run_dir)
    found = sorted(RunDir(run_dir).logs.glob("*.log"))
    chosen = [log for log in found if part in {None, log.stem, log.stem.rpartition("-")[0]}]
    if not chosen and part is not None:
        known = ", ".join(log.stem for log in found) or "none yet"
        fail(f"--part: no process '{part}' has a log; those that have: {known}")
    for log in chosen:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines if tail is None else lines[-tail:]:
            OUT.print(Text.assemble((f"{log.stem} | ", "cyan"), line), soft_wrap=True)
