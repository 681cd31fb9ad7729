"""The last lines after Ctrl-C say what there is, and from where a resume goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo.local.terminal.summary import interruption_notice

RESUME = "`vcpo run run.yaml --run-dir runs/r-001 --resume`"
ANEW = "trains on everything that was accepted, and takes"
EXPORT = "`vcpo export runs/r-001`"


@pytest.mark.parametrize(
    ("checkpoint_step", "last_step", "lines"),
    [
        (
            21,
            21,
            [
                f"The checkpoint of step 21 is saved: {RESUME} goes on from there.",
                f"{EXPORT} writes the model of step 21.",
            ],
        ),
        (
            20,
            23,
            [
                f"The newest checkpoint is that of step 20: {RESUME} {ANEW} steps 21 to 23 anew.",
                f"{EXPORT} writes the model of step 20.",
            ],
        ),
        (
            20,
            21,
            [
                f"The newest checkpoint is that of step 20: {RESUME} {ANEW} step 21 anew.",
                f"{EXPORT} writes the model of step 20.",
            ],
        ),
        (
            None,
            3,
            [
                f"There is no checkpoint: {RESUME} {ANEW} steps 1 to 3 anew.",
                "`vcpo export` has no model to write before there is a checkpoint.",
            ],
        ),
        (
            None,
            0,
            [
                f"No step was taken, and there is no checkpoint: {RESUME} begins with step 1.",
                "`vcpo export` has no model to write before there is a checkpoint.",
            ],
        ),
    ],
)
def test_the_notice_says_what_a_resume_and_an_export_would_find(checkpoint_step, last_step, lines):
    notice = interruption_notice(
        Path("run.yaml"),
        Path("runs/r-001"),
        checkpoint_step=checkpoint_step,
        last_step=last_step,
    )
    assert notice.splitlines() == lines


def test_a_checkpoint_ahead_of_the_journal_is_the_step_that_counts():
    """A full disk may refuse the journal's line."""
    notice = interruption_notice(
        Path("run.yaml"), Path("runs/r-001"), checkpoint_step=21, last_step=19
    )
    assert notice.startswith("The checkpoint of step 21 is saved: ")


def test_paths_with_spaces_are_quoted():
    notice = interruption_notice(Path("a b.yaml"), Path("r 1"), checkpoint_step=1, last_step=1)
    assert "`vcpo run 'a b.yaml' --run-dir 'r 1' --resume`" in notice
    assert "`vcpo export 'r 1'`" in notice
