"""`vcpo events`, `logs` and `report`: what came of a run, from its directory."""

import logging
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from vcpo.api import SpecError
from vcpo.cli.console import ERR, OUT, fail, require_run, say, writing
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import read_events
from vcpo.records.samples import write_whole
from vcpo.report import REPORT_FILE, render_report
from vcpo.report.numbers import moment
from vcpo.report.recorded_run import event_rows, read_run

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


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", help="Directory of a run, or of several.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write. [default: report.html or comparison.html in RUN_DIR]"),
    ] = None,
) -> None:
    """Write a page that says what came of a run: held-out reward, answers, charts and events.

    Several runs lie over each other in the same charts, each in its own color. The page is one
    file that works without network. Drag on a chart to zoom, double-click to show all. `vcpo run`
    writes it after each evaluation and at the end.

    Exit status: 0; 2 if a directory, its records or an option must be fixed first.
    """
    for run_dir in run_dirs:
        require_run(run_dir)
    try:
        with ERR.status("reading the records"):
            page = render_report(*map(read_run, run_dirs))
    except SpecError as error:
        fail(str(error))
    path = output or run_dirs[0] / (REPORT_FILE if len(run_dirs) == 1 else "comparison.html")
    with writing("--output" if output else "RUN_DIR", path if output else path.parent):
        write_whole(path, page)
    say(str(path))
