"""The last words after Ctrl-C: what is on the disk, and from where a resume goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

_FROM_LOG = "again from the redo log, which has everything that was accepted"


def interruption_notice(
    run_file: Path, run_dir: Path, *, checkpoint_step: int | None, last_step: int
) -> str:
    """Return what a resume and an export of an interrupted run would find, a sentence each line.

    checkpoint_step: step of the newest checkpoint; None if there is none.
    last_step: the last step in the journal, 0 if there is none.
    """
    resume = (
        f"`{shlex.join(['vcpo', 'run', str(run_file), '--run-dir', str(run_dir), '--resume'])}`"
    )
    export = f"`{shlex.join(['vcpo', 'export', str(run_dir)])}`"
    start = checkpoint_step or 0
    later = f"step {last_step}" if last_step == start + 1 else f"steps {start + 1} to {last_step}"
    redone = f"{resume} takes {later} {_FROM_LOG}, and goes on from step {last_step}."
    if checkpoint_step is None:
        found = f"There is no checkpoint: {redone}"
        if last_step == 0:
            found = f"No step was taken, and there is no checkpoint: {resume} begins with step 1."
        return f"{found}\n`vcpo export` has no model to write before there is a checkpoint."
    found = f"The newest checkpoint is that of step {start}: {redone}"
    if last_step <= start:
        found = f"The checkpoint of step {start} is saved: {resume} goes on from there."
    return f"{found}\n{export} writes the model of step {start}."
