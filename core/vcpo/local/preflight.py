"""Preflight checks: does this machine have everything that a run needs?

`vcpo validate` and `vcpo run` make these checks before any process starts. The run file itself was
checked when it was read; here its values are compared with the file system and the packages.
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vcpo.api import FieldProblem, GpuUse, VCPORun, run_to_yaml, with_gpu_defaults
from vcpo.api.run import RUN_FOLDER_ANNOTATION
from vcpo.local.models import model_folder, model_problems, num_parameters
from vcpo.service.lifecycle import NOT_TRIED, TRIED
from vcpo.service.logs import END_VARIABLE
from vcpo.service.model_files import is_url
from vcpo.service.process import module_command
from vcpo.tracking.sink import sink_problems

RUN_MODULES = ("torch", "transformers", "vcpo_learner", "vcpo_rollout")
_ROLLOUT_PACKAGE = "vcpo_rollout"
_ROLLOUT_TRIAL, _LEARNER_TRIAL = "vcpo_rollout.trial", "vcpo_learner.estimator.trial"
_PLAN = "vcpo_learner.step_plan"
_TENSORS = "torch"
"""Module that engines and losses import; an install without an extra does not have it."""
_TRIAL_TIMEOUT_S = 120.0
_GIB = 1 << 30
_LEARNER_BYTES = 16
"""Of each trained parameter: the weight, its gradient and two means of AdamW, in float32."""
_FOR_GPUS = 500_000_000
"""Parameters from which on a step is planned for GPUs, also where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFindings:
    """What a look at this machine showed for a run."""

    problems: tuple[FieldProblem, ...] = ()
    warnings: tuple[str, ...] = ()
    """Facts that could not be checked, in sentences that name the field."""
    facts: tuple[str, ...] = ()


def missing_packages(modules: Sequence[str]) -> str:
    """Return which modules cannot be imported, with the fix; empty if all can."""
    missing = ", ".join(name for name in modules if importlib.util.find_spec(name) is None)
    return missing and f"not installed here: {missing}. Fix: pip install 'vcpo[local]'"


def with_local_paths(run: VCPORun, run_file: Path) -> VCPORun:
    """Return the run with absolute paths in place of paths relative to its file.

    These are the model's directory, an environment's parameter `path`, and the folder of the user's
    own environments. A run that already names its folder, such as the spec.yaml of a run directory,
    keeps that folder.
    """
    annotations = {RUN_FOLDER_ANNOTATION: str(run_file.parent.resolve())}
    metadata = run.metadata.model_copy(
        update={"annotations": {**annotations, **run.metadata.annotations}}
    )
    spec = run.spec
    if beside := _beside(run_file, spec.model.name, Path.is_dir):
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"name": beside})})
    data = spec.environment.parameters.get("path")
    if isinstance(data, str) and (beside := _beside(run_file, data, Path.exists)):
        parameters = {**spec.environment.parameters, "path": beside}
        environment = spec.environment.model_copy(update={"parameters": parameters})
        spec = spec.model_copy(update={"environment": environment})
    return run.model_copy(update={"metadata": metadata, "spec": spec})


def _beside(run_file: Path, name: str, exists: Callable[[Path], bool]) -> str | None:
    path = run_file.parent / Path(name).expanduser()
    return str(path.resolve()) if exists(path) else None


def with_one_replica(run: VCPORun) -> VCPORun:
    """Return the run with the ranks of one machine: `learner.replicas` counts pods of a cluster.

    An `fsdpSize` that only the ranks of several pods can fill becomes all ranks of the machine.
    """
    learner = run.spec.learner.model_copy(update={"replicas": 1})
    if learner.fsdp_size is not None and learner.ranks % learner.fsdp_size:
        learner = learner.model_copy(update={"fsdp_size": None})
    spec = run.spec.model_copy(update={"learner": learner})
    return run.model_copy(update={"spec": spec})


def inspect_machine(run: VCPORun) -> MachineFindings:
    """Return what this machine lacks for a run with local paths, and what could not be checked.

    It may take a minute, because it tries the environment, and what else is the user's own.
    """
    of_model = tuple(model_problems(run))
    tried = list(_trials(run, tries_model=not of_model))
    return MachineFindings(
        problems=(
            *of_model,
            *sink_problems(run),
            *(problem for each in tried for problem in each.problems),
        ),
        warnings=(*machine_warnings(run), *(told for each in tried for told in each.warnings)),
        facts=tuple(fact for each in tried for fact in each.facts),
    )


def machine_warnings(run: VCPORun) -> Iterator[str]:
    """Yield what could not be checked on this machine, in sentences that name the field."""
    if is_url(run.spec.model.name) and model_folder(run.spec.model) is None:
        yield f"spec.model.name: {run.spec.model.name!r} will be fetched when the run starts"
    elif model_folder(run.spec.model) is None:
        yield (
            f"spec.model.name: {run.spec.model.name!r} is not a directory beside the file and not"
            " in the Hugging Face cache; it will be downloaded from the hub"
        )
    learner, cores = run.spec.learner, os.cpu_count() or 1
    asked = {"learner.processes": learner.processes, "learner.threads": learner.threads}
    asked |= {f"rollouts[{n}].threads": each.threads for n, each in enumerate(run.spec.rollouts)}
    for field, number in asked.items():
        if (number or 0) > cores:
            fix = f"set at most {cores} to run here"
            yield f"spec.{field} is {number}, and this machine has {cores} cores; {fix}"
    if learner.replicas > 1:
        yield (
            f"spec.learner.replicas: {learner.replicas} pods train together in a cluster; on this"
            f" machine the learner has the ranks of one pod, {learner.ranks_per_replica}"
            " (`learner.processes`)"
        )


def _trials(run: VCPORun, *, tries_model: bool) -> Iterator[MachineFindings]:
    """Yield the errors that a worker or learner would report of what is the user's own."""
    model, algorithm = run.spec.model, run.spec.algorithm
    if tries_model and (folder := model_folder(model)) is not None:
        here, field = _with_folder(run, folder), "spec.model.name"
        command = (_ROLLOUT_TRIAL, "--model")
        yield _try(here, *command, needs="safetensors", field=field, name=model.name)
    command, field = (_ROLLOUT_TRIAL, "--environment"), "spec.environment.name"
    name = run.spec.environment.name
    yield _try(run, *command, needs=_ROLLOUT_PACKAGE, field=field, name=name)
    for index, group in enumerate(run.spec.rollouts):
        name = group.engine_name
        if ":" in name or group.engine_arguments:  # one trial looks at all of them
            command, field = (_ROLLOUT_TRIAL, "--engine"), f"spec.rollouts[{index}].engine"
            yield _try(run, *command, needs=_TENSORS, field=field, name=name)
            break
    functions = {"loss": algorithm.loss, "baseline": algorithm.baseline}
    for function, path in functions.items():
        if path and ":" in path:
            field = f"spec.algorithm.{function}"
            yield _try(run, _LEARNER_TRIAL, needs=_TENSORS, field=field, name=path)
            break


def _with_folder(run: VCPORun, folder: Path) -> VCPORun:
    model = run.spec.model.model_copy(update={"name": str(folder), "revision": None})
    return run.model_copy(update={"spec": run.spec.model_copy(update={"model": model})})


def step_plan(run: VCPORun, use: GpuUse) -> Iterator[str]:
    """Yield what a step takes of GPUs, if any is here or the model needs one; or why nobody knows.

    It takes some seconds, in a process of its own.
    """
    if (folder := model_folder(run.spec.model)) is None:
        needs = "tokens of a micro-step, memory and seconds of a step need the model's config.json"
        yield f"plan      unknown: {needs}; a folder with that file alone will do"
    elif use.learner or not 0 < num_parameters(folder) < _FOR_GPUS:
        given = GpuUse.of_machine(run.spec, has_gpus=True, has_vllm=use.has_vllm or not use.learner)
        here = _with_folder(run, folder)
        here = here.model_copy(update={"spec": with_gpu_defaults(here.spec, given)})
        found = _try(here, _PLAN, needs=_TENSORS, field="spec.learner", name=_PLAN)
        yield from found.facts
        for each in found.problems:
            yield f"plan      none: {each.path}: {each.message}"


def _try(run: VCPORun, *command: str, needs: str, field: str, name: str) -> MachineFindings:
    """Return what a trial says of a run, in a process of its own: it runs the user's code.

    command: a module that reads the run's file, and its options; nothing is downloaded.
    needs: the package without which it cannot; a warning then names what is the user's own.
    """
    if importlib.util.find_spec(needs) is None:
        warning = (
            f"{field}: {name!r} was not checked, because {needs} is not installed here; pip"
            " install 'vcpo[local]' installs it"
        )
        return MachineFindings(warnings=(warning,) if ":" in name else ())
    end = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115 - removed with it
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", END_VARIABLE: end.name}
    try:
        process = subprocess.run(  # noqa: S603 - our own module
            module_command(*command),
            input=run_to_yaml(run),
            env={**os.environ, **offline},
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        warning = (
            f"its trial took longer than {_TRIAL_TIMEOUT_S:g} s and was ended, so nothing is known"
            " of its calls; look at what it loads"
        )
        return MachineFindings(warnings=(f"{field}: {name!r}: {warning}",))
    told = end.read()
    if process.returncode == 0 and process.stdout.endswith(TRIED):
        facts = tuple(process.stdout.removesuffix(TRIED).splitlines())
        warnings = tuple(f"spec.{line}" for line in told.splitlines())
        return MachineFindings(warnings=warnings, facts=facts)
    named, _, message = told.partition(": ")
    path = f"spec.{named.removeprefix('spec.')}"
    if re.fullmatch(r"[\w.\[\]-]+", named) is None:  # an exception's own words
        path, message = field, told
    if told and process.returncode == NOT_TRIED:
        return MachineFindings(warnings=(f"{path}: not tried to the end: {message}",))
    if told:
        return MachineFindings(problems=(FieldProblem(path=path, value="", message=message),))
    last = (process.stderr.strip().splitlines() or ["no output"])[-1]
    message = f"its trial ended early, with status {process.returncode}: {last}"
    problem = FieldProblem(path=field, value=repr(name), message=message)
    return MachineFindings(problems=(problem,))


def found_lines(run: VCPORun, use: GpuUse) -> Iterator[str]:
    """Yield how a run with local paths would be carried out on this machine."""
    spec, batch = with_gpu_defaults(run.spec, use), run.spec.batch
    size = f"{batch.prompts_per_step} prompts x {batch.trajectories_per_prompt} responses"
    lag = f"lag at most {spec.algorithm.max_policy_lag_steps} versions"
    asked = f"{spec.steps * batch.prompts_per_step:,} prompts in all"
    yield f"steps     {spec.steps:,} of {size}: {asked}; {lag}"
    every = spec.evaluation.every_steps
    if every:
        yield f"held out  {spec.evaluation.prompts} prompts every {every} steps"
    for given, group in zip(run.spec.rollouts, spec.rollouts, strict=True):
        why = "as the file says" if given.engine else "vLLM for GPUs is not installed"
        if not given.engine and (use.has_vllm or group.name not in use.groups):
            why = "a GPU is here" if group.name in use.groups else "no GPU is here"
        engine = f"engine {group.engine} ({why}), {group.precision}"
        device = "GPU" if group.name in use.groups else "CPU"
        yield f"workers   {group.name}: {engine} on the {device}, up to {group.max_replicas}"
    yield f"learner   {spec.learner.precision} on the {'GPU' if use.learner else 'CPU'}"
    if (folder := model_folder(spec.model)) is not None and (count := num_parameters(folder)):
        learner = (4 if spec.model.lora else _LEARNER_BYTES) * count / _GIB
        needs = f"learner {learner:.2g} GiB, each worker {4 * count / _GIB:.2g} GiB"
        yield f"memory    {count / 1e6:,.3g} M parameters; at most {needs}, and activations"
