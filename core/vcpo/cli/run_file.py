"""The run file of a command: reading it, what this machine lacks for it, and how it is refused."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from vcpo.api import (
    FieldProblem,
    SpecError,
    VCPORun,
    algorithm_warnings,
    batch_warnings,
    load_run,
    rollout_warnings,
)
from vcpo.cli.console import ERR, fail, tell
from vcpo.local.preflight import (
    MachineFindings,
    inspect_machine,
    missing_packages,
    with_local_paths,
)

RunFile = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE",
        help="Run file: a VCPORun in YAML. Fields of further files replace those of earlier ones;"
        " null takes one away, and relative paths start at the first file.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field in place of the file, as in algorithm.maxPolicyLagSteps=12; repeatable.",
    ),
]


def load_file(files: Sequence[Path], changes: Sequence[str] | None = None) -> VCPORun:
    """Read a run file and its layers with local paths; exit with their problems."""
    first, *layers = files
    try:
        return with_local_paths(load_run(first, changes or (), layers=layers), first)
    except SpecError as error:
        fail(str(error))


def watch_inspection(run: VCPORun) -> MachineFindings:
    """Look at this machine for a run, and show that it takes a while."""
    with ERR.status(f"checking the model and trying environment {run.spec.environment.name}"):
        return inspect_machine(run)


def refuse(
    files: Sequence[Path], problems: Iterable[FieldProblem], modules: Sequence[str] = ()
) -> None:
    """Exit with all problems of a run, and with the modules that are not installed."""
    errors = [told] if (told := missing_packages(modules)) else []
    if problems := tuple(problems):
        errors.append(str(SpecError(" + ".join(map(str, files)), problems)))
    if errors:
        fail("\n".join(errors))


def warn(loaded: VCPORun, of_machine: Iterable[str]) -> None:
    """Print what is seldom wanted of a run, and what could not be checked on this machine."""
    spec = loaded.spec
    found = {
        "spec.algorithm: ": algorithm_warnings(spec.algorithm),
        "spec.batch: ": batch_warnings(spec.batch, spec.algorithm),
        "spec.rollouts: ": rollout_warnings(spec.model, spec.rollouts),
        "": of_machine,
    }
    for field, warnings in found.items():
        for warning in warnings:
            tell(f"warning: {field}{warning}")
