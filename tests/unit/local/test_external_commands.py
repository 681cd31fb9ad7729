"""The arguments that `vcpo export` passes to its process."""

from __future__ import annotations

from pathlib import Path

from vcpo.local.external_commands import ExportOptions


def export_arguments(**given):
    defaults = {"directory": None, "step": None, "best": False, "adapters": False}
    return ExportOptions(source=Path("-runs/r"), **(defaults | given)).arguments()


def test_export_passes_no_option_that_was_not_given():
    assert export_arguments() == ["--", "-runs/r"]


def test_export_passes_every_option_that_was_given():
    arguments = export_arguments(step=0, best=True, adapters=True, directory=Path("--odd"))
    options = ["--best", "--adapters", "--step=0"]
    assert arguments == [*options, "--", "-runs/r", "--odd"]
