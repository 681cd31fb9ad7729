"""`vcpo`: run, validate, report, export, study, schema."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from vcpo.local.export import EXPORT_MODULES, ExportOptions, become_export
from vcpo.local.host import Host, HostOptions
from vcpo.local.preflight import check_machine, machine_warnings, with_local_paths
from vcpo.local.processes.fleet import RunFailedError, check_installed
from vcpo.local.run_dir import RunDir, new_run_dir
from vcpo.local.study import STUDY_MODULES, StudyOptions, become_study
from vcpo.local.terminal.ending import Ending, RunOutcome, outcome_of_complete
from vcpo.local.terminal.summary import summarize
from vcpo.local.terminal.view import make_view
from vcpo.metrics import AddressError
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import read_metrics
from vcpo.report import write_report
from vcpo.service.run_lock import LockHolder, RunLockedError, run_lock
from vcpo.spec import (
    SpecError,
    VCPORun,
    algorithm_warnings,
    batch_warnings,
    continuation_changes,
    continuation_document,
    json_schema,
    load_run,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
Asynchronous RL post-training of language models that stays stable (VCPO).

A run is one YAML file of kind `VCPORun`.

* **vcpo validate run.yaml** says everything that is wrong with a file, at once
* **vcpo run run.yaml** starts a learner and rollout workers on this machine and shows them work
* **vcpo run run.yaml --run-dir DIR --resume** goes on from the newest checkpoint
* **vcpo report DIR** writes DIR/report.html from a run's records
* **vcpo export DIR** writes the model of a run's newest checkpoint, after Ctrl-C too
* **vcpo study study.yaml** compares methods over a grid of policy lags and seeds, on this machine

Ctrl-C ends a run in good order, with a checkpoint; a second Ctrl-C ends it at once.
""",
)

_OUT = Console()
_ERR = Console(stderr=True)
_USER_ERROR = 2

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run, a VCPORun in YAML.")]


@app.command()
def run(
    file: RunFile,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where records, checkpoints and the model go. [default: runs/NAME-NNN]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --run-dir.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON that sums the run up.")
    ] = False,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the host's /metrics; 0 takes a free one.")
    ] = 0,
) -> None:
    """Train on this machine: one learner process, as many rollout workers as the run allows.

    The run's directory then holds spec.yaml, metrics.jsonl, events.jsonl, checkpoints/, model/
    (loads with AutoModelForCausalLM.from_pretrained), logs/ and report.html.

    Ends with status 0 when all steps were taken, 1 when the run failed, 2 when there is something
    to put right first, 3 when every step was skipped and the model is unchanged, and 130 after
    Ctrl-C.
    """
    loaded = _load(file)
    _warn(loaded)
    directory = _directory(loaded, run_dir, resume=resume)
    _end_if_complete(loaded, directory, as_json=as_json)
    try:
        check_installed()
        check_machine(loaded, file)
    except (RunFailedError, SpecError) as error:
        _fail(str(error))
    options = HostOptions(resume=resume, metrics_port=metrics_port)
    with _writing("--run-dir", directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
    try:
        with run_lock(directory.path, LockHolder.HOST):
            outcome = _train(loaded, directory, options)
    except RunLockedError as error:
        _fail(f"--run-dir: {error}")
    except AddressError as error:
        _fail(f"--metrics-port: {error}")
    report_path = _report(directory)
    summary = summarize(directory.path)
    _OUT.print(_summary_table(summary, outcome.ending))
    if report_path is not None:
        _OUT.print(f"report: {report_path}", soft_wrap=True, markup=False)
    if outcome.ending is Ending.INTERRUPTED:
        hint = f"vcpo export {directory.path}"
        _OUT.print(f"`{hint}` writes the model as it is now", soft_wrap=True, markup=False)
    if outcome.message:
        _ERR.print(outcome.message, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        _OUT.print(json.dumps(summary), soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(int(outcome.ending))


@app.command()
def validate(file: RunFile) -> None:
    """Check a run file: every problem at once, each with its field, the value and the cure."""
    loaded = _load(file)
    try:
        check_machine(loaded, file)
    except SpecError as error:
        _fail(str(error))
    _warn(loaded)
    batch = loaded.spec.batch
    _OUT.print(
        f"{file}: valid. {loaded.metadata.name}: {loaded.spec.steps} steps of "
        f"{batch.prompts_per_step} prompts x {batch.trajectories_per_prompt} trajectories, "
        f"lag at most {loaded.spec.algorithm.max_policy_lag_steps} versions.",
        soft_wrap=True,
        markup=False,
    )


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a local run.")],
) -> None:
    """Write RUN_DIR/report.html: reward, ESS, effective learning rate, lag, and what happened."""
    if not RunDir(run_dir).is_used:
        _fail(f"RUN_DIR: {run_dir} holds no run; give the directory that `vcpo run` printed")
    try:
        with _writing("RUN_DIR", run_dir):
            path = write_report(run_dir)
    except SpecError as error:
        _fail(str(error))
    _OUT.print(str(path), soft_wrap=True, markup=False)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="The checkpoint's step. [default: the newest]")
    ] = None,
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="The adapters of a LoRA run, as peft reads them."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where to. [default: RUN_DIR/exports/step-N]")
    ] = None,
) -> None:
    """Write a model from a checkpoint: loads with AutoModelForCausalLM.from_pretrained.

    Adapters are merged into their model, or with --adapters load with PeftModel.from_pretrained.
    """
    if not RunDir(run_dir).is_used:
        _fail(f"RUN_DIR: {run_dir} holds no run; give the directory that `vcpo run` printed")
    try:
        check_installed(EXPORT_MODULES)
    except RunFailedError as error:
        _fail(str(error))
    become_export(ExportOptions(run_dir=run_dir, step=step, adapters=adapters, output=output))


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The study, a VCPOStudy in YAML.")],
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the cells' records go. [default: runs/NAME OF FILE]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the report goes. [default: as --dir]")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at a time. [default: one per core]")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run this method only; repeatable.")
    ] = None,
    lags: Annotated[
        list[int] | None, typer.Option(metavar="K", help="Run this lag only; repeatable.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; write the report of what is there.")
    ] = False,
) -> None:
    """Compare methods over a grid of lags and seeds, with every batch exactly as old as it says.

    A cell (method, lag, learning rate, seed) is one process on one core; one that was run before
    with the same settings is not run again. Ctrl-C loses the cells under way; the same command goes
    on. Writes results.md, results.json and figures.
    """
    options = StudyOptions(
        file=file,
        directory=directory,
        output=output,
        jobs=jobs,
        methods=tuple(only or ()),
        lags=tuple(lags or ()),
        report_only=report_only,
    )
    try:
        check_installed(STUDY_MODULES)
    except RunFailedError as error:
        _fail(str(error))
    become_study(options)


@app.command()
def schema() -> None:
    """Print the JSON schema of a run file."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _train(loaded: VCPORun, directory: RunDir, options: HostOptions) -> RunOutcome:
    with _writing("--run-dir", directory.path):
        directory.create(loaded)
    _OUT.print(f"run directory: {directory.path}", soft_wrap=True, markup=False)
    with make_view(_OUT) as view:
        return asyncio.run(Host(loaded, directory, view, options).run())


def _load(file: Path) -> VCPORun:
    try:
        return with_local_paths(load_run(file), file)
    except SpecError as error:
        _fail(str(error))


def _warn(loaded: VCPORun) -> None:
    for warning in algorithm_warnings(loaded.spec.algorithm):
        _ERR.print(f"warning: spec.algorithm: {warning}", soft_wrap=True, markup=False)
    for warning in batch_warnings(loaded.spec.batch, loaded.spec.algorithm):
        _ERR.print(f"warning: spec.batch: {warning}", soft_wrap=True, markup=False)
    for warning in machine_warnings(loaded):
        _ERR.print(f"warning: {warning}", soft_wrap=True, markup=False)


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    """Around what writes where the user said."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        _fail(f"{option}: {path} cannot be written ({reason}); give a directory that you may write")


def _directory(loaded: VCPORun, path: Path | None, *, resume: bool) -> RunDir:
    if path is None:
        if resume:
            _fail("--resume: needs --run-dir, the directory of the run to go on with")
        with _writing("runs", Path("runs")):
            return new_run_dir(loaded.metadata.name, Path("runs"))
    directory = RunDir(path)
    if directory.is_used and not resume:
        _fail(f"--run-dir: {path} already holds a run; add --resume, or give another directory")
    if directory.spec.exists():
        _check_continues(loaded, directory)
    return directory


def _report(directory: RunDir) -> Path | None:
    """Write a run's report, or say why not: the run's own end is not changed by it."""
    try:
        return write_report(directory.path)
    except OSError as error:
        _ERR.print(
            f"report: not written, {error.strerror} ({directory.path}); once that is put right,"
            f" `vcpo report {directory.path}` writes it",
            soft_wrap=True,
            markup=False,
        )
        return None


def _end_if_complete(loaded: VCPORun, directory: RunDir, *, as_json: bool) -> None:
    """End at once, as it did then, when the run has taken its steps and left its model."""
    model = ExportedModel.read(directory.model)
    if model is None or model.step < loaded.spec.steps:
        return
    _OUT.print(
        f"already complete: {model.step} steps; the model is in {directory.model}. More `steps` in"
        " the file go on from there.",
        soft_wrap=True,
        markup=False,
    )
    outcome = outcome_of_complete(read_metrics(directory.path).steps)
    if outcome.message:
        _ERR.print(outcome.message, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        summary = json.dumps(summarize(directory.path))
        _OUT.print(summary, soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(int(outcome.ending))


def _check_continues(loaded: VCPORun, directory: RunDir) -> None:
    """Refuse a file that cannot continue the run in the directory, before anything is written."""
    try:
        before, after = map(continuation_document, (load_run(directory.spec), loaded))
    except SpecError as error:
        _fail(str(error))
    if changes := "".join(f"\n  {change}" for change in continuation_changes(before, after)):
        _fail(
            f"--resume: a checkpoint of {directory.path} cannot go on with what changed:{changes}\n"
            f"set it back, resume with {directory.spec}, or give another directory"
        )


def _summary_table(summary: dict[str, Any], ending: Ending) -> Table:
    table = Table(
        title=ending.name.lower().replace("_", " "), show_header=False, title_justify="left"
    )
    for key, value in summary.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(key, shown)
    return table


def _fail(message: str) -> NoReturn:
    _ERR.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(_USER_ERROR)


if __name__ == "__main__":
    app()
