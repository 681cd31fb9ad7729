"""`python -m vcpo_learner.export`: writes a model that others load, from a checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from transformers.utils import logging

from vcpo.api import load_run
from vcpo.api.errors import problems_of
from vcpo.api.workloads import Model
from vcpo.records.exported_model import ExportDtype, ExportedModel
from vcpo.records.journal import read_metrics
from vcpo.service.lifecycle import CANNOT_START, StartError, start_errors
from vcpo.service.model_files import local_model
from vcpo_learner.checkpoints.disk import best_evaluated_step, folder_bytes, size_text
from vcpo_learner.checkpoints.folder import (
    TENSORS,
    DamagedCheckpointError,
    checked_manifest,
    checkpoint_path,
    checkpoint_paths,
)
from vcpo_learner.checkpoints.manifest import MANIFEST_FILE, DamageError
from vcpo_learner.model.loading import DTYPES, load_tokenizer
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.skeleton import build_skeleton

_CONSOLE = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, see `python -m vcpo_learner.export --help`."""

    source: Path
    """Run directory, or one checkpoint."""
    directory: Path | None
    """Folder to write; None is one in `exports/` of the run directory."""
    step: int | None
    best: bool
    adapters: bool
    dtype: ExportDtype | None = None
    """Number format of the model; None is that of the model that the run started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """An intact checkpoint, and what is known of its run."""

    path: Path
    step: int
    files: Collection[str]
    """Paths of its files, below `path`."""
    run: str
    run_dir: Path | None
    """The run directory; None if the checkpoint is not in one."""
    model: Model


def main() -> int:
    """Export and print the folder; return 0, or 2 if the user must correct something."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = _parse_options()
    try:
        with start_errors():
            output = export(options)
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_START
    sys.stdout.write(f"{output}\n")
    return 0


def export(options: Options) -> Path:
    """Write a model, or its adapters, from a checkpoint, and return the folder.

    Raises:
        StartError: naming the option and the cure.
        DiskFullError: if the disk has no room for it.
    """
    if options.directory is not None:
        _check_directory(options.directory)
    chosen = _choose(options)
    if options.adapters and chosen.model.lora is None:
        raise StartError(
            "--adapters: the run trains all parameters (no spec.model.lora); omit the option"
        )
    if options.adapters and options.dtype is not None:
        raise StartError("--dtype: adapters are written in float32; omit the option")
    folder = options.directory or _default_folder(chosen, adapters=options.adapters)
    settings = chosen.model
    name = local_model(settings.name, with_weights=settings.lora is not None)
    trust, revision = settings.trust_remote_code, settings.revision
    tokenizer = load_tokenizer(name, revision, trust_remote_code=trust)
    skeleton = build_skeleton(name, revision, trust_remote_code=trust)
    if settings.lora is not None:
        # peft takes seconds to import, and few runs need it.
        from vcpo_learner.model.lora import add_adapters

        add_adapters(skeleton, settings.lora)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    exporting = ModelExport(chosen.run, settings, skeleton, tokenizer, dtype)
    write = exporting.write_adapters if options.adapters else exporting.write_model
    try:
        with _show_progress(f"writing step {chosen.step} to {folder}"):
            write(folder, chosen.path / TENSORS, step=chosen.step)
    except (OSError, DamageError) as error:
        if all((chosen.path / name).is_file() for name in chosen.files):
            if isinstance(error, DamageError):
                raise DamagedCheckpointError(chosen.path, error) from error
            raise
        raise StartError(
            f"{chosen.path}: was removed while it was exported, as a run does with old checkpoints"
            " (spec.checkpoint.keep); export again, or copy the checkpoint and export the copy"
        ) from error
    return folder


def _choose(options: Options) -> _Chosen:
    """Choose a checkpoint and compare its files with their checksums.

    Raises:
        StartError: if there is no such checkpoint.
    """
    source = options.source
    if (source / MANIFEST_FILE).is_file():
        if options.step is not None or options.best:
            raise StartError(f"--step, --best: {source} is one checkpoint; leave them out")
        run_dir = source.resolve().parent.parent
        return _verify(source, run_dir if (run_dir / "spec.yaml").is_file() else None)
    folder = source / "checkpoints"
    if options.best:
        return _verify(checkpoint_path(folder, _best_step(source, folder)), source)
    if options.step is not None:
        return _verify(checkpoint_path(folder, options.step), source)
    return _newest(folder, source)


def _newest(folder: Path, run_dir: Path) -> _Chosen:
    """Return the newest intact checkpoint; warn about newer, damaged ones."""
    for _, path in sorted(checkpoint_paths(folder).items(), reverse=True):
        try:
            return _verify(path, run_dir)
        except DamagedCheckpointError as error:
            sys.stderr.write(f"warning: {error}; skipped\n")
    raise StartError(
        f"{run_dir}: there is no checkpoint yet, or none is intact; a run writes one every"
        " spec.checkpoint.everySteps steps and after Ctrl-C, and one that has ended when `vcpo run"
        f" FILE --run-dir {run_dir} --resume` goes on with it"
    )


def _best_step(run_dir: Path, folder: Path) -> int:
    steps = sorted(checkpoint_paths(folder))
    metrics = read_metrics(run_dir)
    best = best_evaluated_step({each.step: each.accuracy for each in metrics.evaluations}, steps)
    if best is None:
        raise StartError(
            f"--best: no checkpoint of {run_dir} was evaluated (there are"
            f" {', '.join(map(str, steps)) or 'none'}); spec.checkpoint.everySteps and"
            " spec.evaluation.everySteps meet at no step so far; give --step"
        )
    return best


def _verify(path: Path, run_dir: Path | None) -> _Chosen:
    with _show_progress(
        f"comparing {path.name} ({size_text(folder_bytes(path))}) with its checksums"
    ):
        manifest = checked_manifest(path)
    name = path.name if run_dir is None else load_run(run_dir / "spec.yaml").metadata.name
    return _Chosen(
        path=path,
        step=manifest.step,
        files=manifest.files.keys(),
        run=name,
        run_dir=run_dir,
        model=_model(path, manifest.spec),
    )


def _model(path: Path, spec: Mapping[str, Any]) -> Model:
    """Return the model of the spec that a checkpoint holds.

    Raises:
        DamagedCheckpointError: naming the field.
    """
    try:
        return Model.model_validate(spec.get("model"))
    except ValidationError as error:
        problem = problems_of(error)[0]
        field = f"spec.model.{problem.path}: {problem.message}"
        raise DamagedCheckpointError(
            path, f"{path / MANIFEST_FILE}: {field}; restore the checkpoint from a copy"
        ) from error


def _default_folder(chosen: _Chosen, *, adapters: bool) -> Path:
    if chosen.run_dir is None:
        raise StartError(
            f"DIR: {chosen.path} is in no run directory; say where to write, as in"
            f" `vcpo export {chosen.path} DIR`"
        )
    kind = "-adapters" if adapters else ""
    return chosen.run_dir / "exports" / f"step-{chosen.step:08d}{kind}"


def _check_directory(directory: Path) -> None:
    """Check that a folder is new, empty, or an exported model that may be replaced."""
    is_export = ExportedModel.read(directory) is not None
    if directory.exists() and not is_export and (directory.is_file() or any(directory.iterdir())):
        raise StartError(f"DIR: {directory} holds something else; give a new directory")


@contextmanager
def _show_progress(what: str) -> Iterator[None]:
    """Show on a terminal what takes long."""
    if not _CONSOLE.is_terminal:
        yield
        return
    with _CONSOLE.status(what):
        yield


def _parse_options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_learner.export",
        description="Write the model of a checkpoint as a directory that others load.",
    )
    parser.add_argument("source", type=Path, help="run directory, or one checkpoint")
    parser.add_argument(
        "directory", type=Path, nargs="?", help="folder to write; default: in exports/ of the run"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    which.add_argument("--best", action="store_true", help="the best-evaluated checkpoint")
    parser.add_argument("--adapters", action="store_true", help="write the LoRA adapters only")
    parser.add_argument(
        "--dtype",
        type=ExportDtype,
        choices=list(ExportDtype),
        help="number format of the model; default: that of the initial model",
    )
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
