"""`vcpo top`, `vcpo events`, `vcpo logs`: look at runs without touching them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vcpo.cli.console import ERR, OUT, fail
from vcpo.local.run_dir import RunDir
from vcpo.monitor.cluster_logs import ClusterEvents, cluster_logs
from vcpo.monitor.cluster_runs import find_run
from vcpo.monitor.event_lines import EventSource, event_json, event_text, follow_events
from vcpo.monitor.kubectl import KubectlError, Scope
from vcpo.monitor.local_run import LocalEvents, run_directories
from vcpo.monitor.log_lines import UnknownPartError, follow_logs
from vcpo.monitor.run_row import runs_table
from vcpo.monitor.screen import show_top
from vcpo.monitor.sources import ClusterSource, LocalSource

_RUNS = Path("runs")
_PIPE_WIDTH = 160
"""Characters of a line that nobody's terminal breaks."""

Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="RUN is a VCPORun of this namespace of the cluster."),
]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run directory; with --namespace the name of a VCPORun."),
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
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Show the VCPORuns of this namespace instead."),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the VCPORuns of the cluster.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and end; for scripts.")
    ] = False,
) -> None:
    """Show all runs, one row each, and open the panel of one.

    Columns: status; steps taken; reward and accuracy; ESS of the last batch as a share of the
    on-policy one; early warning of a collapse; factor on the learning rate; median lag, lag that is
    admitted now (below the last number: the run is throttled) and bound of the spec; workers ready
    and wanted; response tokens per second; age of the numbers.

    A cluster's runs are read by kubectl, with your access and your current context. Without a
    terminal the table is printed once.
    """
    is_of_cluster = namespace is not None or all_namespaces or (_is_plugin() and not places)
    if places and is_of_cluster:
        fail("DIR: cannot be combined with --namespace or --all-namespaces; give one of them")
    places = places or [_RUNS]
    source: LocalSource | ClusterSource
    if is_of_cluster:
        source = ClusterSource(Scope(namespace=namespace, is_all=all_namespaces))
    elif run_directories(places):
        source = LocalSource(places)
    else:
        named = ", ".join(str(place) for place in places)
        fail(f"DIR: no run in {named}; give the directory that `vcpo run` printed, or its parent")
    with _until_interrupted():
        asyncio.run(_show(source, as_json))


def events(
    run: Run,
    namespace: Namespace = None,
    follow: Follow = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as one line of JSON.")
    ] = False,
) -> None:
    """Print what happened to a run: events of the host and of the learner, by time.

    In a cluster: the operator's events, which Kubernetes keeps for an hour, and those in the
    learner's log.
    """
    source: EventSource
    if namespace is not None or _is_plugin():
        source = ClusterEvents(_scope_of(run, namespace), run)
    else:
        source = LocalEvents(_run_dir(run))
    with _until_interrupted():
        for event in follow_events(source, follow=follow, sleep=time.sleep):
            if as_json:
                typer.echo(event_json(event))
            else:
                OUT.print(event_text(event), soft_wrap=True)


def logs(
    run: Run,
    namespace: Namespace = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="learner, a rollout group (main) or one local worker (main-0). [default: all]",
        ),
    ] = None,
    follow: Follow = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Last lines of each log. [default: all]")
    ] = None,
) -> None:
    """Print the logs of a run's processes, each line after the name of its process.

    Lines in JSON, which pods write, are shown as text.
    """
    if namespace is not None or _is_plugin():
        scope = _scope_of(run, namespace)
        lines = cluster_logs(scope, run, part, tail=tail, follow=follow)
    else:
        directory = _run_dir(run)
        has_ended = LocalEvents(directory).has_ended
        lines = follow_logs(
            directory,
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


async def _show(source: LocalSource | ClusterSource, as_json: bool) -> None:
    """Show the screen; print once as JSON, or without a terminal as a table."""
    async with source:
        if as_json:
            typer.echo(json.dumps({"runs": [row.to_dict() for row in await source.rows()]}))
        elif OUT.is_terminal:
            await show_top(source, OUT)
        else:
            table = runs_table(await source.rows(), width=_PIPE_WIDTH)
            Console(width=_PIPE_WIDTH).print(table)
        if notice := source.notice():
            ERR.print(notice, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _run_dir(run: str) -> Path:
    path = Path(run)
    if not RunDir(path).has_run:
        fail(
            f"RUN: {path} has no run; give the directory that `vcpo run` printed, or --namespace"
            " for a run of a cluster"
        )
    return path


def _scope_of(run: str, namespace: str | None) -> Scope:
    """Return the scope of a VCPORun that exists. namespace: None is that of the context."""
    scope = Scope(namespace=namespace)
    try:
        found = find_run(scope, run)
    except KubectlError as error:
        fail(str(error))
    if found is None:
        where = "your current namespace" if namespace is None else f"namespace {namespace}"
        fail(f"RUN: no VCPORun '{run}' in {where}; `vcpo top --all-namespaces` shows all runs")
    return scope


def _is_plugin() -> bool:
    """Return whether kubectl started this process, as `kubectl vcpo`: runs are then a cluster's."""
    return Path(sys.argv[0]).name == "kubectl-vcpo"


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """End quietly on Ctrl-C; report what kubectl refuses."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except KubectlError as error:
        fail(str(error))
