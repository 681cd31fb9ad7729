"""`vcpo export`: a run's model for others to load, or its records for a tracking service."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from rich.progress import track

from vcpo.api import SpecError, load_run
from vcpo.api.errors import problems_of
from vcpo.api.tracking import Sink, SinkName, Tracking, WandbMode
from vcpo.cli.console import ERR, fail, require_modules, require_run, say
from vcpo.local.run_dir import RunDir
from vcpo.service.process import module_command
from vcpo.tracking.follow import RecordTail, missing_records
from vcpo.tracking.sink import TrackedRun, check_sinks, deliver, open_sink

_MODULES: Final = ("torch", "transformers", "vcpo_learner")
_CHECKPOINT_FILE: Final = "meta.json"
"""Manifest in a checkpoint's folder."""
_OPTIONS: Final = {"name": "--to", "mode": "--offline", "directory": "DIR"}
"""Options that have another name than the field of the sink that they set."""


_Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT", help="Directory of a run, or one of its checkpoints."
    ),
]
_Directory = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="Folder to write. [default: one in RUN_DIR/exports]"),
]
_Step = Annotated[
    int | None, typer.Option(min=1, help="Step of the checkpoint. [default: the newest]")
]
_Best = Annotated[bool, typer.Option("--best", help="The checkpoint with the best evaluation.")]
_Adapters = Annotated[
    bool, typer.Option("--adapters", help="Write only the LoRA adapters, in the format of peft.")
]
_Model = Annotated[
    str | None,
    typer.Option(help="Model that the run started from. [default: that of RUN_DIR's spec.yaml]"),
]
_Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let Python code of that model's folder run.")
]
_To = Annotated[
    str | None,
    typer.Option(
        metavar="SERVICE",
        help="Copy the records to this tracking service (tensorboard, wandb, or your own"
        " package.module:Class); write no model.",
    ),
]
_Project = Annotated[
    str | None, typer.Option(help="With --to: project of W&B. [default: the spec's]")
]
_Url = Annotated[
    str | None, typer.Option(help="With --to: address of the service. [default: the spec's]")
]
_Offline = Annotated[
    bool, typer.Option("--offline", help="With --to wandb: write to RUN_DIR/wandb, send nothing.")
]


def export(
    source: _Source,
    directory: _Directory = None,
    step: _Step = None,
    best: _Best = False,
    adapters: _Adapters = False,
    model: _Model = None,
    trust_remote_code: _Trust = False,
    to: _To = None,
    project: _Project = None,
    url: _Url = None,
    offline: _Offline = False,
) -> None:
    """Write the model of a checkpoint, or copy the run's records to a tracking service.

    The model has a form that AutoModelForCausalLM.from_pretrained loads; LoRA adapters are merged
    into it. Its number format is that of the model that the run started from. With --adapters only
    the adapters are written, and PeftModel.from_pretrained loads them. Any number of learner
    processes may have written the checkpoint, and no GPU is needed. Of a CHECKPOINT without its
    RUN_DIR, --model says where its model is from, and --trust-remote-code whether its code may run.

    With --to all steps, evaluations and events are copied, to a run of its own in the service. A
    second copy changes nothing, or adds what came since: `vcpo export RUN --to tensorboard`, then
    `tensorboard --logdir RUN/exports/tensorboard`.
    """
    if to is None:
        if project or url or offline:
            fail("--project, --url, --offline: need --to, the tracking service to copy to")
        if step is not None and best:
            fail("--step, --best: name one checkpoint; give one of them")
        if not (source / _CHECKPOINT_FILE).is_file():
            require_run(source)
        require_modules(_MODULES)
        which = {"step": step, "best": best, "adapters": adapters}
        code = {"model": model, "trust_remote_code": trust_remote_code}
        arguments = export_arguments(source, directory, **which, **code)
        command = module_command("vcpo_learner.export", *arguments)
        os.execv(sys.executable, command)  # noqa: S606 - its exit status and signals are the user's
    require_run(source)
    if step is not None or best or adapters:
        fail("--step, --best, --adapters: are of a model; leave them out beside --to")
    if directory is not None and to != SinkName.TENSORBOARD:
        fail(f"DIR: {to} has no folder; give --project or --url")
    given = {
        "name": to,
        "project": project,
        "url": url,
        "mode": WandbMode.OFFLINE if offline else None,
        "directory": str(directory) if directory else None,
    }
    _copy_records(source, given)


def export_arguments(*places: Path | None, **options: object) -> list[str]:
    """Return the arguments of `python -m vcpo_learner.export`: the options that are given."""
    given = {f"--{name.replace('_', '-')}": each for name, each in options.items()}
    named = [f"{name}={each}" for name, each in given.items() if type(each) in {int, str}]
    flags = [name for name, each in given.items() if each is True]
    return [*flags, *named, "--", *(str(each) for each in places if each is not None)]


def _copy_records(run_dir: Path, given: dict[str, str | None]) -> None:
    """Copy a run's records; an option that is not given is as in the spec's own sink."""
    try:
        run = load_run(RunDir(run_dir).spec)
        settings = _settings(run.spec.tracking, run_dir, given)
        tracking = Tracking(sinks=(settings,))
        check_sinks(
            run.model_copy(update={"spec": run.spec.model_copy(update={"tracking": tracking})})
        )
    except ValidationError as error:
        problems = (
            replace(problem, path=_OPTIONS.get(problem.path, f"--{problem.path}"))
            for problem in problems_of(error)
        )
        fail("\n".join(str(problem) for problem in problems))
    except (SpecError, ValueError) as error:
        fail(str(error))
    tracked = TrackedRun(run=run, run_dir=run_dir, is_copy=True)
    try:
        with ERR.status(f"connecting to {settings.name}"):
            sink = open_sink(settings, tracked)
        missing = list(missing_records(RecordTail(run_dir).read(), sink.sent_steps()))
        for record, step in track(
            missing, f"to {settings.name}", console=ERR, transient=True, disable=not ERR.is_terminal
        ):
            deliver(sink, record, step)
        sink.close(failed=False)
    except Exception as error:  # noqa: BLE001 - a client of a service may raise anything
        fail(f"--to {settings.name}: {type(error).__name__}: {error}")
    where = settings.directory or settings.url or ""
    say(f"{len(missing)} records copied to {settings.name}{where and ': '}{where}")


def _settings(tracking: Tracking, run_dir: Path, given: dict[str, str | None]) -> Sink:
    of_spec = next((sink for sink in tracking.sinks if sink.name == given["name"]), None)
    chosen = of_spec.model_dump(exclude={"directory"}) if of_spec else {}
    if given["name"] == SinkName.TENSORBOARD:
        chosen["directory"] = str(run_dir / "exports" / "tensorboard")
    return Sink.model_validate({**chosen, **{k: v for k, v in given.items() if v is not None}})
