"""`vcpo`: init, try, run, validate, samples, events, logs, report, export, schema."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import vcpo
from vcpo.api import (
    GpuUse,
    SpecError,
    VCPORun,
    continuation_changes,
    continuation_document,
    gpu_warnings,
    json_schema,
    load_run,
    missing_gpus,
    with_gpu_defaults,
)
from vcpo.cli.console import ERR, OUT, fail, reading, say, tell, writing
from vcpo.cli.events import events, logs, report
from vcpo.cli.export import export
from vcpo.cli.init import init
from vcpo.cli.run_file import Changes, RunFile, load_file, refuse, warn, watch_inspection
from vcpo.cli.samples import samples, try_file
from vcpo.local.host import LOOPBACK, Host, HostOptions
from vcpo.local.models import hub_problems, model_problems
from vcpo.local.preflight import RUN_MODULES, found_lines, step_plan, with_one_replica
from vcpo.local.processes.fleet import with_kv_cache
from vcpo.local.processes.forks import fork_services
from vcpo.local.processes.gpus import find_gpus, gpu_problems, local_gpu_use
from vcpo.local.run_dir import RunDir, new_run_dir
from vcpo.local.terminal.summary import (
    Ending,
    RunOutcome,
    end_lines,
    interruption_notice,
    outcome_of_complete,
    run_summary,
)
from vcpo.local.terminal.view import make_view
from vcpo.metrics import AddressError, HostMetrics, serve_metrics
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import read_events, read_metrics
from vcpo.report import write_report
from vcpo.report.outcome import resume_command
from vcpo.report.recorded_run import read_run
from vcpo.service.run_lock import LockHolder, RunLockedError, run_lock

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
Asynchronous RL post-training of language models that stays stable (VCPO).

A run is one YAML file of kind `VCPORun`.

* **vcpo run run.yaml --set algorithm.maxPolicyLagSteps=12 --steps 20** changes fields for a run
* **vcpo run run.yaml --run-dir DIR --resume** resumes from the newest checkpoint
* **vcpo samples RUN --worst** shows answers that a run was trained on, and their rewards
* **vcpo report RUN RUN** compares two runs
* **vcpo export DIR --to wandb** copies the records of a run to a tracking service

Ctrl-C finishes the step, saves a checkpoint and stops the run, within `learner.drainSeconds`. A
second Ctrl-C stops it at once.
""",
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        say(f"vcpo {vcpo.__version__}")


@app.command()
def run(
    files: RunFile,
    changes: Changes = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps; short for --set steps=N.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for records, checkpoints and the model. [default: runs/NAME-NNN]"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in --run-dir.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as one line of JSON at the end.")
    ] = False,
    metrics_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the host's /metrics; 0 takes a free port."),
    ] = 0,
    until_input_ends: Annotated[
        bool, typer.Option(hidden=True, help="End of standard input is Ctrl-C; for programs.")
    ] = False,
) -> None:
    """Train on this machine with one learner process and up to maxReplicas rollout workers.

    The run directory gets spec.yaml, metrics.jsonl, events.jsonl, checkpoints/, logs/, report.html
    and model/, which AutoModelForCausalLM.from_pretrained loads.

    Exit status: 0 if all steps were taken; 1 if the run failed; 2 if an option, the file or this
    machine must be fixed first; 3 if every step was skipped and the model is unchanged; 4 if the
    reward collapsed and did not recover; 130 after Ctrl-C.
    """
    changes = [*(changes or ()), *([] if steps is None else [f"steps={steps}"])]
    given = load_file(files, changes)
    use = local_gpu_use(given.spec)
    loaded = given.model_copy(update={"spec": with_gpu_defaults(given.spec, use)})
    directory = _directory(loaded, run_dir, resume=resume)
    _end_if_complete(loaded, directory, as_json=as_json)
    found = watch_inspection(loaded)
    refuse(files, [*found.problems, *gpu_problems(loaded)], modules=RUN_MODULES)
    refuse(files, hub_problems(loaded))
    warn(given, [*gpu_warnings(given.spec, use), *found.warnings])
    forks = fork_services(loaded, has_gpus=use.learner)  # before a thread, a socket, a lock
    metrics = HostMetrics()
    with contextlib.ExitStack() as at_end:
        try:
            # Before the directory is made: a run that cannot start takes no number.
            with serve_metrics(metrics.registry, LOOPBACK, metrics_port) as server:
                options = HostOptions(
                    resume=resume,
                    metrics=metrics,
                    metrics_port=server.port,
                    ends_with_input=until_input_ends,
                    forks=forks,
                )
                with _hold_directory(directory):
                    outcome = _train(loaded, directory, options)
                    if outcome.ending is Ending.INTERRUPTED:
                        # A further Ctrl-C does not cut off how the run can go on.
                        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
                        at_end.callback(signal.signal, signal.SIGINT, before)
        except AddressError as error:
            fail(f"--metrics-port: {error}")
        given_file = directory.spec if changes or files[1:] else files[0]  # has what was set
        _show_end(given_file, directory, outcome, as_json=as_json)
    raise typer.Exit(int(outcome.ending))


@app.command()
def validate(files: RunFile, changes: Changes = None) -> None:
    """Check a run file: list every problem with its field, value and fix, and what was found."""
    loaded = load_file(files, changes)
    found = watch_inspection(loaded)
    uses = (local_gpu_use(loaded.spec), GpuUse.from_spec(loaded.spec))
    with ERR.status("planning a step"):
        plan = () if any(model_problems(loaded)) else tuple(step_plan(loaded, uses[0]))
    for line in plan if found.problems else ():
        say(line)
    refuse(files, found.problems)
    slow = dict.fromkeys(each for use in uses for each in gpu_warnings(loaded.spec, use))
    in_cluster = (f"in a cluster: {each}" for each in missing_gpus(loaded.spec))
    warn(loaded, [*slow, *found.warnings, *in_cluster])
    for problem in gpu_problems(loaded):  # the file may be for another machine
        tell(f"warning: {problem}")
    say(f"{' + '.join(map(str, files))}: valid")
    for line in (*found.facts, *found_lines(loaded, uses[0]), *plan):
        say(line)


app.command()(init)
app.command("try")(try_file)
app.command()(samples)
app.command()(events)
app.command()(logs)
app.command()(report)
app.command()(export)


@app.command()
def schema() -> None:
    """Print the JSON schema of a run file: each field with its range, default and meaning."""
    typer.echo(json.dumps(json_schema(), indent=2))


@contextlib.contextmanager
def _hold_directory(directory: RunDir) -> Iterator[None]:
    """Make and lock a run's directory; if no run is created in it, nothing new stays."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
        undo.callback(directory.remove_unused, directory.missing_folders)
        with writing("--run-dir", directory.path):
            directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds prompts
            try:
                held.enter_context(run_lock(directory.path, LockHolder.HOST))
            except RunLockedError as error:
                undo.pop_all()  # it is the other host's
                fail(f"--run-dir: {error}")
        yield


def _train(loaded: VCPORun, directory: RunDir, options: HostOptions) -> RunOutcome:
    loaded = with_kv_cache(with_one_replica(loaded), find_gpus())
    with writing("--run-dir", directory.path):
        directory.create(loaded)
    say(f"run directory: {directory.path}")
    with make_view(OUT) as view:
        return asyncio.run(Host(loaded, directory, view, options).run())


def _directory(loaded: VCPORun, path: Path | None, *, resume: bool) -> RunDir:
    if path is None:
        if resume:
            fail("--resume: needs --run-dir, the directory of the run to resume")
        with writing("runs", Path("runs")):
            return new_run_dir(loaded.metadata.name, Path("runs"))
    directory = RunDir(path)
    with reading("--run-dir", path):
        can_resume = directory.has_run
    if resume and not can_resume:
        why = f"has no {directory.spec.name}" if path.exists() else "does not exist"
        fail(
            f"--resume: {path} {why}, so there is no run to resume; give the directory that `vcpo"
            " run` printed as --run-dir, or leave out both options to start a new run"
        )
    if directory.is_used and not resume:
        fix = "add --resume, or give" if can_resume else "give"
        fail(f"--run-dir: {path} already has a run; {fix} another directory")
    if can_resume:
        _check_continues(loaded, directory)
    return directory


def _show_end(file: Path, directory: RunDir, outcome: RunOutcome, *, as_json: bool) -> None:
    """Write the report, and print how the run ended; file: that a resume takes."""
    report_path = _report(directory)
    recorded = read_run(directory.path)
    for line in end_lines(recorded, outcome.ending, report_path):
        say(line)
    if outcome.ending is Ending.INTERRUPTED:
        notice = interruption_notice(
            file,
            directory.path,
            checkpoint_step=directory.newest_checkpoint_step,
            last_step=recorded.last_step,
        )
        say(notice)
    if outcome.message:
        has_failed = outcome.ending is Ending.FAILED
        fix = f"\nFix this, then: {resume_command(file, directory.path)}" if has_failed else ""
        tell(f"{outcome.message}{fix}", "red")
    if as_json:
        say(json.dumps(run_summary(directory.path, outcome.ending)))


def _report(directory: RunDir) -> Path | None:
    """Write a run's report; an error is printed and does not change how the run ended."""
    try:
        return write_report(directory.path)
    except OSError as error:
        tell(
            f"report: not written, {error.strerror} ({directory.path}); after fixing that,"
            f" `vcpo report {directory.path}` writes it"
        )
        return None


def _end_if_complete(loaded: VCPORun, directory: RunDir, *, as_json: bool) -> None:
    """Exit with the status of the finished run if all its steps were taken and its model exists."""
    model = ExportedModel.read(directory.model)
    if model is None or model.step < loaded.spec.steps:
        return
    outcome = outcome_of_complete(loaded, read_metrics(directory.path), read_events(directory.path))
    ended = "collapsed" if outcome.ending is Ending.COLLAPSED else "complete"
    say(
        f"already {ended}: {model.step} steps; the model is in {directory.model}. To continue,"
        " raise `steps` in the file."
    )
    if outcome.message:
        tell(outcome.message, "red")
    if as_json:
        say(json.dumps(run_summary(directory.path, outcome.ending)))
    raise typer.Exit(int(outcome.ending))


def _check_continues(loaded: VCPORun, directory: RunDir) -> None:
    """Exit if the file cannot resume the run in the directory; nothing is written before."""
    try:
        before, after = map(continuation_document, (load_run(directory.spec), loaded))
    except SpecError as error:
        fail(str(error))
    if changes := "".join(f"\n  {change}" for change in continuation_changes(before, after)):
        fail(
            f"--resume: these changes are not possible for a run of {directory.path}:{changes}\n"
            f"undo them, resume with {directory.spec}, or give another directory"
        )
    taken = max((each.step for each in read_metrics(directory.path).steps), default=0)
    if taken > loaded.spec.steps:
        fail(
            f"--resume: spec.steps is {loaded.spec.steps}, and the run has taken {taken} steps;"
            f" give {taken} or more, or another directory"
        )


if __name__ == "__main__":
    app()
