"""`python -m vcpo_learner.export`: writes a model that others load, from a checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from vcpo.api import load_run
from vcpo.api.workloads import Model
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import read_metrics
from vcpo.service.lifecycle import CANNOT_START, StartError, start_errors
from vcpo.service.model_files import local_model
from vcpo_learner.checkpoints.folder import (
    TENSORS,
    DamagedCheckpointError,
    best_evaluated_step,
    checked_manifest,
    checkpoint_path,
    checkpoint_paths,
)
from vcpo_learner.checkpoints.manifest import MANIFEST_FILE, CheckpointManifest
from vcpo_learner.model.loading import load_tokenizer
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.skeleton import build_skeleton


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


def main() -> int:
    """Export and print the folder; return 0, or 2 if the user must correct something."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with start_errors():
            output = export(_parse_options())
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_START
    sys.stdout.write(f"{output}\n")
    return 0


def export(options: Options) -> Path:
    """Write a model, or its adapters, from a checkpoint, and return the folder."""
    path, manifest = _choose(options)
    settings = Model.model_validate(manifest.spec["model"])
    if options.adapters and settings.lora is None:
        raise StartError(
            "--adapters: the run trains all parameters (no spec.model.lora); omit the option"
        )
    run_dir = path.resolve().parent.parent
    kind = "-adapters" if options.adapters else ""
    folder = options.directory or run_dir / "exports" / f"step-{manifest.step:08d}{kind}"
    _require_replaceable(folder)
    name = local_model(settings.name, with_weights=settings.lora is not None)
    trust, revision = settings.trust_remote_code, settings.revision
    skeleton = build_skeleton(name, revision, trust_remote_code=trust)
    if settings.lora is not None:
        # peft takes seconds to import, and few runs need it.
        from vcpo_learner.model.lora import add_adapters

        add_adapters(skeleton, settings.lora)
    spec = run_dir / "spec.yaml"
    exporting = ModelExport(
        load_run(spec).metadata.name if spec.is_file() else path.name,
        settings,
        skeleton,
        load_tokenizer(name, revision, trust_remote_code=trust),
    )
    write = exporting.write_adapters if options.adapters else exporting.write_model
    write(folder, path / TENSORS, step=manifest.step)
    return folder


def _choose(options: Options) -> tuple[Path, CheckpointManifest]:
    """Return a checkpoint whose files have their checksums."""
    source, folder = options.source, options.source / "checkpoints"
    if (source / MANIFEST_FILE).is_file():
        return source, checked_manifest(source)
    step = _best_step(source) if options.best else options.step
    if step is not None:
        path = checkpoint_path(folder, step)
        return path, checked_manifest(path)
    for _, path in sorted(checkpoint_paths(folder).items(), reverse=True):
        try:
            return path, checked_manifest(path)
        except DamagedCheckpointError as error:
            sys.stderr.write(f"warning: {error}; skipped\n")
    raise StartError(
        f"{source}: there is no checkpoint yet, or none is intact; a run writes one every"
        " spec.checkpoint.everySteps steps, and at its end"
    )


def _best_step(run_dir: Path) -> int:
    steps = checkpoint_paths(run_dir / "checkpoints")
    accuracies = {each.step: each.accuracy for each in read_metrics(run_dir).evaluations}
    best = best_evaluated_step(accuracies, steps)
    if best is None:
        raise StartError(f"--best: no checkpoint of {run_dir} was evaluated; give --step")
    return best


def _require_replaceable(folder: Path) -> None:
    is_export = ExportedModel.read(folder) is not None
    if folder.exists() and not is_export and (folder.is_file() or any(folder.iterdir())):
        raise StartError(f"DIR: {folder} holds something else; give a new directory")


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
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
