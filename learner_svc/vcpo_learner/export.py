"""`python -m vcpo_learner.export`: writes a model that others load, from a checkpoint of a run."""

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
    """The command line, see `vcpo export --help`."""

    source: Path
    directory: Path | None = None
    step: int | None = None
    best: bool = False
    adapters: bool = False
    model: str | None = None
    trust_remote_code: bool = False


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
    run_name, settings = _settings(options, path, manifest)
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
    exporting = ModelExport(
        run_name,
        settings,
        skeleton,
        load_tokenizer(name, revision, trust_remote_code=trust),
    )
    write = exporting.write_adapters if options.adapters else exporting.write_model
    write(folder, path / TENSORS, step=manifest.step)
    return folder


def _settings(options: Options, path: Path, manifest: CheckpointManifest) -> tuple[str, Model]:
    """Return the run's name and its model, as the spec.yaml of the run directory says.

    A checkpoint by itself may be a stranger's: it lets no code run, and chooses no host.
    """
    given: dict[str, object] = {}
    if path != options.source:
        run = load_run(options.source / "spec.yaml")
        name, settings = run.metadata.name, run.spec.model
    else:
        name, settings = path.name, Model.model_validate(manifest.spec["model"])
        if settings.trust_remote_code and not options.trust_remote_code:
            fix = "read it, and give --trust-remote-code"
            raise StartError(f"{path}: asks to run Python code of its model; {fix}")
        if options.model is None and not Path(settings.name).is_dir():
            fix = "give --model, the directory, name on the hub or URL of that model"
            raise StartError(f"{path}: {settings.name!r} is not a directory here; {fix}")
    if options.model is not None:
        given |= {"name": options.model, "revision": None}
    if options.trust_remote_code:
        given["trust_remote_code"] = True
    return name, settings.model_copy(update=given)


def _choose(options: Options) -> tuple[Path, CheckpointManifest]:
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
    when = "a run writes one every spec.checkpoint.everySteps steps, and at its end"
    raise StartError(f"{source}: there is no checkpoint yet, or none is intact; {when}")


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
    parser = argparse.ArgumentParser(description="What `vcpo export` runs; its help is there.")
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--step", type=int)
    parser.add_argument("--model")
    for flag in ("--best", "--adapters", "--trust-remote-code"):
        parser.add_argument(flag, action="store_true")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
