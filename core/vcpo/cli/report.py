"""`vcpo report`: the report of a run, in a file or served."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from vcpo.api import SpecError
from vcpo.cli.console import ERR, OUT, fail, require_run, writing
from vcpo.report import REPORT_FILE, render_report
from vcpo.report.following import FollowedPage, PageServer
from vcpo.report.page import write_page
from vcpo.report.recorded_run import read_run


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write. [default: RUN_DIR/report.html]")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Serve the page on this machine, and update it meanwhile."),
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of --follow; 0 takes a free port."),
    ] = 0,
) -> None:
    """Write a page with rewards, ESS, early warning, effective learning rate, lag and events.

    The page is one file that works without network. Drag on a chart to zoom, double-click to show
    all; CSV and JSON save what is shown. With --follow it is served on 127.0.0.1 and updates every
    two seconds until Ctrl-C. To compare runs, send their records to a tracker: `spec.tracking`, or
    `vcpo export --to`.

    Exit status: 0; 2 if a directory, its records or an option must be fixed first.
    """
    if follow and output is not None:
        fail("--output: not with --follow, which writes no file; leave one of them out")
    if port and not follow:
        fail("--port: only with --follow; add it, or leave the port out")
    require_run(run_dir)
    try:
        with ERR.status("reading the records"):
            page = render_report(read_run(run_dir))
    except SpecError as error:
        fail(str(error))
    if follow:
        _serve(run_dir, port)
        return
    path = output or run_dir / REPORT_FILE
    with writing("--output" if output else "RUN_DIR", path if output else path.parent):
        write_page(path, page)
    OUT.print(str(path), soft_wrap=True, markup=False)


def _serve(run_dir: Path, port: int) -> None:
    """Serve the page until Ctrl-C."""
    page = FollowedPage(run_dir, lambda: render_report(read_run(run_dir), follows=True))
    try:
        server = PageServer(page, port)
    except OSError as error:
        fail(f"--port: {port} cannot be opened ({error.strerror}); give another one, or 0")
    with server:
        OUT.print(f"{server.url}  (Ctrl-C ends)", soft_wrap=True, markup=False)
        # An interrupt that arrives in the middle of a request may be lost as an exception.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        server.serve_forever()
