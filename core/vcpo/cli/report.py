"""`vcpo report`: write the report of a run, or lay runs over each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcpo.api import SpecError
from vcpo.cli.console import ERR, fail, require_run, say, writing
from vcpo.records.samples import write_whole
from vcpo.report import REPORT_FILE, render_report
from vcpo.report.recorded_run import read_run


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
