"""`python -m vcpo_learner.export`: writes a model that others load, from a run's checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging

from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import CANNOT_START, StartError, start_errors
from vcpo.spec import load_run
from vcpo_learner.checkpoints.folder import Checkpoint, CheckpointFolder
from vcpo_learner.model.loading import load_policy
from vcpo_learner.model.model_folder import ModelExport


def main() -> int:
    """Export and print the folder; return 0, or 2 if the user must correct something."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = _parse_options()
    try:
        with start_errors():
            output = export(
                options.run_dir, step=options.step, adapters=options.adapters, output=options.output
            )
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_START
    sys.stdout.write(f"{output}\n")
    return 0


def export(run_dir: Path, *, step: int | None, adapters: bool, output: Path | None) -> Path:
    """Write a model from a checkpoint of a run, and return its folder.

    step: of the checkpoint; None is the newest intact one.
    adapters: write the LoRA adapters only, to be loaded with their base model.
    output: folder to write; None is a folder in `exports/` of the run directory.

    Raises:
        StartError: naming the option and the cure.
        DiskFullError: if the disk has no room for it.
    """
    run = load_run(run_dir / "spec.yaml")
    if adapters and run.spec.model.lora is None:
        raise StartError(
            "--adapters: the run trains all parameters (no spec.model.lora); omit the option"
        )
    if output is not None:
        _check_output(output)
    checkpoint = _checkpoint(CheckpointFolder(run_dir / "checkpoints", run), step)
    kind = "-adapters" if adapters else ""
    folder = output or run_dir / "exports" / f"step-{checkpoint.step:08d}{kind}"
    model, tokenizer = load_policy(
        run.spec.model.name, run.spec.model.revision, run.spec.model.lora
    )
    exporting = ModelExport(run, model, tokenizer)
    write = exporting.write_adapters if adapters else exporting.write_model
    write(folder, checkpoint.tensors, step=checkpoint.step)
    return folder


def _checkpoint(folder: CheckpointFolder, step: int | None) -> Checkpoint:
    """Read the checkpoint of a step, or the newest intact one; warn about damaged ones.

    Raises:
        StartError: if there is no such checkpoint.
    """
    if step is not None:
        return folder.load(step)
    checkpoint, damaged = folder.load_newest()
    for one in damaged:
        sys.stderr.write(f"warning: {one}; skipped\n")
    if checkpoint is None:
        raise StartError(
            "RUN_DIR: there is no checkpoint yet; Ctrl-C makes the run write one, and"
            " spec.checkpoint.everySteps sets how often the run writes one"
        )
    return checkpoint


def _check_output(output: Path) -> None:
    """Check that a folder is new, empty, or an exported model that may be replaced."""
    is_export = ExportedModel.read(output) is not None
    if output.exists() and not is_export and (output.is_file() or any(output.iterdir())):
        raise StartError(f"--output: {output} holds something else; give a new directory")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_learner.export",
        description="Write the model of a run's checkpoint as a directory that others load.",
    )
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--adapters", action="store_true", help="write the LoRA adapters only")
    parser.add_argument("--output", type=Path, help="directory; default: in exports/ of the run")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
