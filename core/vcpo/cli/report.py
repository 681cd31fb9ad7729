"""`vcpo report`: write the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcpo.api import SpecError
from vcpo.cli.console import ERR, OUT, fail, require_run, writing
from vcpo.report import REPORT_FILE, render_report
from vcpo.report.page import write_page
from vcpo.report.recorded_run import read_run


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write. [default: RUN_DIR/report.html]")
    ] = None,
) -> None:
    """Write a page with rewards, ESS, early warning, effective learning rate, lag and events.

    The page is one file that works without network. Drag on a chart to zoom, double-click to show
    all. `vcpo run` writes it after each evaluation and at the end. To compare runs, send their
    records to a tracker: `spec.tracking`, or `vcpo export --to`.

    Exit status: 0; 2 if a directory, its records or an option must be fixed first.
    """
    require_run(run_dir)
    try:
        with ERR.status("reading the records"):
            page = render_report(read_run(run_dir))
    except SpecError as error:
        fail(str(error))
    path = output or run_dir / REPORT_FILE
    with writing("--output" if output else "RUN_DIR", path if output else path.parent):
        write_page(path, page)
    OUT.print(str(path), soft_wrap=True, markup=False)
