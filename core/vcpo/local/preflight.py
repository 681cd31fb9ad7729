"""Preflight: what this machine must hold for a run, looked at before any process starts.

The file itself was checked when it was read; here its words are held against the file system. Both
`vcpo validate` and `vcpo run` ask.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from vcpo.local.models import model_folder, model_problems
from vcpo.service.lifecycle import START_ERROR_MARK
from vcpo.spec import FieldProblem, SpecError, VCPORun, run_to_yaml
from vcpo.spec.run import RUN_FOLDER_ANNOTATION

_ROLLOUT_PACKAGE = "vcpo_rollout"
_IMPORT_TIMEOUT_S = 120.0


def with_local_paths(run: VCPORun, run_file: Path) -> VCPORun:
    """The run with what it names relative to its file spelled out.

    That is a model's directory, and the folder in which environments of the user's own are looked
    for. A run that knows its folder already, as the one of a run directory, keeps it.
    """
    annotations = {RUN_FOLDER_ANNOTATION: str(run_file.parent.resolve())}
    metadata = run.metadata.model_copy(
        update={"annotations": {**annotations, **run.metadata.annotations}}
    )
    beside = run_file.parent / Path(run.spec.model.name).expanduser()
    if not beside.is_dir():
        return run.model_copy(update={"metadata": metadata})
    model = run.spec.model.model_copy(update={"name": str(beside.resolve())})
    spec = run.spec.model_copy(update={"model": model})
    return run.model_copy(update={"metadata": metadata, "spec": spec})


def check_machine(run: VCPORun, run_file: Path) -> None:
    """Check that this machine has what a run with local paths needs.

    Raises:
        SpecError: with every problem.
    """
    problems = [*model_problems(run), *_environment_problems(run)]
    if problems:
        raise SpecError(str(run_file), problems)


def machine_warnings(run: VCPORun) -> Iterator[str]:
    """What could not be checked here, in sentences that name the field."""
    if model_folder(run.spec.model) is None:
        yield (
            f"spec.model.name: {run.spec.model.name!r} is no directory beside the file and not in"
            " the Hugging Face cache: it will be asked for on the hub"
        )
    if _is_foreign(run) and importlib.util.find_spec(_ROLLOUT_PACKAGE) is None:
        yield (
            f"spec.environment.name: {run.spec.environment.name!r} was not looked for: no rollout"
            " worker is installed here; pip install 'vcpo[local]' installs one"
        )


def _environment_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """What a rollout worker would say of an environment that is not shipped.

    Asked in a process of its own, since importing a class runs its module.
    """
    if not _is_foreign(run) or importlib.util.find_spec(_ROLLOUT_PACKAGE) is None:
        return
    name = run.spec.environment.name
    try:
        asked = subprocess.run(  # noqa: S603 - our own module, by our own interpreter
            [sys.executable, "-m", f"{_ROLLOUT_PACKAGE}.environments"],
            input=run_to_yaml(run),
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"was not imported within {_IMPORT_TIMEOUT_S:g} s; a worker would wait as long"
        yield FieldProblem(path="spec.environment.name", value=repr(name), message=message)
        return
    _, mark, complaint = asked.stderr.rpartition(START_ERROR_MARK)
    if mark:
        field, _, message = complaint.strip().partition(": ")
        yield FieldProblem(path=f"spec.{field}", value="", message=message)
    elif asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["without a word"])[-1]
        message = f"ends the process that imports it, with status {asked.returncode}: {last}"
        yield FieldProblem(path="spec.environment.name", value=repr(name), message=message)


def _is_foreign(run: VCPORun) -> bool:
    return ":" in run.spec.environment.name
