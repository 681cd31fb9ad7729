"""`vcpo top`, `vcpo events`, `vcpo logs`: look at runs of this machine without touching them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vcpo.cli.console import ERR, OUT, fail
from vcpo.local.run_dir import RunDir
from vcpo.monitor.event_lines import event_json, event_text, follow_events
from vcpo.monitor.local_run import LocalEvents, LocalRuns, run_directories
from vcpo.monitor.log_lines import UnknownPartError, follow_logs
from vcpo.monitor.run_row import runs_table
from vcpo.monitor.screen import show_top

_RUNS = Path("runs")
_PIPE_WIDTH = 160
"""Characters of a line that nobody's terminal breaks."""

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, as `vcpo run` printed it.")
]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait for more, until the run ends or Ctrl-C.")
]


def top(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...",
            help="Run directories, or folders of run directories. [default: runs]",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and end; for scripts.")
    ] = False,
) -> None:
    """Show all runs, one row each, and open the panel of one.

    Columns: status; steps taken; reward and accuracy; ESS of the last batch as a share of the
    on-policy one; early warning of a collapse; factor on the learning rate; median lag, lag that is
    admitted now (below the last number: the run is throttled) and bound of the spec; workers ready
    and wanted; response tokens per second; age of the numbers.

    Without a terminal the table is printed once. The runs of a cluster: `kubectl get vrun --watch`.
    """
    places = places or [_RUNS]
    if not run_directories(places):
        named = ", ".join(str(place) for place in places)
        fail(f"DIR: no run in {named}; give the directory that `vcpo run` printed, or its parent")
    with _until_interrupted():
        asyncio.run(_show(LocalRuns(places), as_json))


def events(
    run: Run,
    follow: Follow = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as one line of JSON.")
    ] = False,
) -> None:
    """Print what happened to a run: events of the host and of the learner, by time.

    Three or more of one kind in a row are one line, with the last one's words; JSON has each.
    """
    source = LocalEvents(_require_run(run))
    with _until_interrupted():
        for row in follow_events(source, follow=follow, sleep=time.sleep):
            if as_json:
                for event in row.events:
                    typer.echo(event_json(event))
            else:
                OUT.print(event_text(row), soft_wrap=True)


def logs(
    run: Run,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="learner, a rollout group (main) or one worker (main-0). [default: all]",
        ),
    ] = None,
    follow: Follow = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Last lines of each log. [default: all]")
    ] = None,
) -> None:
    """Print the logs of a run's processes, each line after the name of its process.

    Lines in JSON are shown as text.
    """
    has_ended = LocalEvents(_require_run(run)).has_ended
    lines = follow_logs(
        run,
        part,
        tail=tail,
        is_over=lambda: not follow or has_ended(),
        sleep=time.sleep,
    )
    with _until_interrupted():
        try:
            for line in lines:
                OUT.print(Text.assemble((f"{line.process} | ", "cyan"), line.text), soft_wrap=True)
        except UnknownPartError as error:
            fail(str(error))


async def _show(runs: LocalRuns, as_json: bool) -> None:
    """Show the screen; print once as JSON, or without a terminal as a table."""
    async with runs:
        if as_json:
            typer.echo(json.dumps({"runs": [row.to_dict() for row in await runs.rows()]}))
        elif OUT.is_terminal:
            await show_top(runs, OUT)
        else:
            table = runs_table(await runs.rows(), width=_PIPE_WIDTH)
            Console(width=_PIPE_WIDTH).print(table)
        if notice := runs.notice():
            ERR.print(notice, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _require_run(run: Path) -> Path:
    """Return a run directory; end if it has no run."""
    if not RunDir(run).has_run:
        fail(f"RUN: {run} has no run; give the directory that `vcpo run` printed")
    return run


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """End quietly on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
