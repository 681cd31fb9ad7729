"""Preflight checks: does this machine have everything that a run needs?

`vcpo validate` and `vcpo run` make these checks before any process starts. The run file itself was
checked when it was read; here its values are compared with the file system and the packages.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vcpo.local.models import model_folder, model_problems
from vcpo.service.lifecycle import START_ERROR_MARK
from vcpo.service.model_files import is_url
from vcpo.spec import FieldProblem, SpecError, VCPORun, load_valid_part, run_to_yaml
from vcpo.spec.run import RUN_FOLDER_ANNOTATION
from vcpo.tracking.services import package_problems

RUN_MODULES = ("torch", "transformers", "vcpo_learner", "vcpo_rollout")
"""Modules that a local run needs."""
_ROLLOUT_PACKAGE = "vcpo_rollout"
_IMPORT_TIMEOUT_S = 120.0
_DECISIVE_FIELDS = {
    "spec.algorithm": "spec.algorithm",
    "spec.environment": "spec.environment.parameters",
}
"""Fields without which nothing can be said of the others of their section."""


class MissingPackagesError(RuntimeError):
    """Packages that a command needs are not installed."""


def check_installed(modules: Sequence[str]) -> None:
    """Check that modules can be imported.

    Raises:
        MissingPackagesError: naming the missing modules and the cure.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackagesError(
            f"not installed here: {', '.join(missing)}. Cure: pip install 'vcpo[local]'"
        )


def with_local_paths(run: VCPORun, run_file: Path) -> VCPORun:
    """Return the run with absolute paths in place of paths relative to its file.

    These are the model's directory and the folder of the user's own environments. A run that
    already names its folder, such as the spec.yaml of a run directory, keeps that folder.
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


def with_one_replica(run: VCPORun) -> VCPORun:
    """Return the run with the ranks of one machine: `learner.replicas` counts pods of a cluster.

    An `fsdpSize` that only the ranks of several pods can fill becomes all ranks of the machine.
    """
    learner = run.spec.learner.model_copy(update={"replicas": 1})
    if learner.fsdp_size is not None and learner.ranks % learner.fsdp_size:
        learner = learner.model_copy(update={"fsdp_size": None})
    spec = run.spec.model_copy(update={"learner": learner})
    return run.model_copy(update={"spec": spec})


def machine_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield what this machine lacks of model, trackers and environment of a run with local paths.

    It may take a minute, because it starts a process that imports the environment.
    """
    yield from model_problems(run)
    yield from package_problems(run.spec.tracking)
    yield from _environment_problems(run)


def problems_beside(
    error: SpecError, run_file: Path, check: Callable[[VCPORun], Iterable[FieldProblem]]
) -> SpecError:
    """Return the error of a run file with what a check of the machine finds in its valid fields.

    check: gets the run with local paths, without the fields that `error` names. What it finds in
        fields that depend on those is left out.
    """
    run = load_valid_part(run_file) if error.is_of_fields else None
    if run is None:
        return error
    found = [
        problem
        for problem in check(with_local_paths(run, run_file))
        if not any(_may_follow(problem.path, known.path) for known in error.problems)
    ]
    return SpecError(error.source, [*error.problems, *found])


def _may_follow(path: str, cause: str) -> bool:
    """Return whether a problem of the field `path` may come from leaving out the field `cause`."""
    decisive = _DECISIVE_FIELDS.get(".".join(path.split(".")[:2]))
    is_decided = decisive is not None and _is_within(cause, decisive)
    return is_decided or _is_within(path, cause) or _is_within(cause, path)


def _is_within(path: str, field: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))


def machine_warnings(run: VCPORun) -> Iterator[str]:
    """Yield what could not be checked on this machine, in sentences that name the field."""
    if is_url(run.spec.model.name) and model_folder(run.spec.model) is None:
        yield f"spec.model.name: {run.spec.model.name!r} will be fetched when the run starts"
    elif model_folder(run.spec.model) is None:
        yield (
            f"spec.model.name: {run.spec.model.name!r} is no directory beside the file and not in"
            " the Hugging Face cache; it will be downloaded from the hub"
        )
    if (learner := run.spec.learner).replicas > 1:
        yield (
            f"spec.learner.replicas: {learner.replicas} pods train together in a cluster; on this"
            f" machine the learner has the ranks of one pod, {learner.ranks_per_replica}"
            " (`learner.processes`)"
        )
    if _is_custom_environment(run) and importlib.util.find_spec(_ROLLOUT_PACKAGE) is None:
        yield (
            f"spec.environment.name: {run.spec.environment.name!r} was not checked, because the"
            " rollout worker is not installed here; pip install 'vcpo[local]' installs it"
        )


def _environment_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield the errors that a rollout worker would report for the user's own environment.

    The class is imported in another process, because an import runs the module's code.
    """
    if not _is_custom_environment(run) or importlib.util.find_spec(_ROLLOUT_PACKAGE) is None:
        return
    name = run.spec.environment.name
    try:
        process = subprocess.run(  # noqa: S603 - our own module, by our own interpreter
            [sys.executable, "-m", f"{_ROLLOUT_PACKAGE}.environments"],
            input=run_to_yaml(run),
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"its import took longer than {_IMPORT_TIMEOUT_S:g} s, at a worker as well"
        yield FieldProblem(path="spec.environment.name", value=repr(name), message=message)
        return
    _, mark, start_error = process.stderr.rpartition(START_ERROR_MARK)
    if mark:
        field, _, message = start_error.strip().partition(": ")
        yield FieldProblem(path=f"spec.{field}", value="", message=message)
    elif process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no output"])[-1]
        message = f"its import ends the process with status {process.returncode}: {last}"
        yield FieldProblem(path="spec.environment.name", value=repr(name), message=message)


def _is_custom_environment(run: VCPORun) -> bool:
    return ":" in run.spec.environment.name
