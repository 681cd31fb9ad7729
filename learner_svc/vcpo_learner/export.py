"""`python -m vcpo_learner.export`: a model that others load, from a run's checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging

from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import CANNOT_START, StartError, start_errors
from vcpo.spec import load_run
from vcpo_learner.model.checkpoint import Checkpoint, CheckpointFolder
from vcpo_learner.model.loading import load_policy, restore_policy
from vcpo_learner.model.model_folder import ModelExport


def main() -> int:
    """Export and say where to; 0 done, 2 to be put right."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = _options()
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
    """Write a model from a checkpoint of a run, and return the folder that it is in.

    step: None is the newest checkpoint that is whole.
    adapters: them alone, to be loaded beside their model.
    output: None is `exports/` in the run directory.

    Raises:
        StartError: naming the option and the cure.
        DiskFullError: when there is no room for it.
    """
    run = load_run(run_dir / "spec.yaml")
    if adapters and run.spec.model.lora is None:
        raise StartError(
            "--adapters: the run trains all parameters (spec.model.lora is not given); leave it out"
        )
    if output is not None:
        _require_replaceable(output)
    checkpoint = _checkpoint(CheckpointFolder(run_dir / "checkpoints", run), step)
    kind = "-adapters" if adapters else ""
    folder = output or run_dir / "exports" / f"step-{checkpoint.step:08d}{kind}"
    model, tokenizer = load_policy(
        run.spec.model.name, run.spec.model.revision, run.spec.model.lora
    )
    restore_policy(model, checkpoint.parameters)
    exporting = ModelExport(run, model, tokenizer)
    write = exporting.write_adapters if adapters else exporting.write_model
    write(folder, step=checkpoint.step)
    return folder


def _checkpoint(folder: CheckpointFolder, step: int | None) -> Checkpoint:
    if step is not None:
        return folder.load(step)
    checkpoint, damaged = folder.load_newest()
    for one in damaged:
        sys.stderr.write(f"warning: {one}; left out\n")
    if checkpoint is None:
        raise StartError(
            "RUN_DIR: there is no checkpoint yet; Ctrl-C makes the run write one, and"
            " spec.checkpoint.everySteps says how often it does so itself"
        )
    return checkpoint


def _require_replaceable(output: Path) -> None:
    is_ours = ExportedModel.read(output) is not None
    if output.exists() and not is_ours and (output.is_file() or any(output.iterdir())):
        raise StartError(f"--output: {output} holds something else; give a new directory")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_learner.export",
        description="Writes the model of a run's checkpoint as a directory that others load.",
    )
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, help="the checkpoint's step; without it the newest")
    parser.add_argument("--adapters", action="store_true", help="adapters beside their model")
    parser.add_argument("--output", type=Path, help="where to; without it exports/ of the run")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
