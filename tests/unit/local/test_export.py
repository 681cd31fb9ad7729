"""The way from `vcpo export` to the exporting process."""

from __future__ import annotations

from pathlib import Path

from vcpo.local.export import ExportOptions


def arguments(**asked):
    nothing = {"step": None, "adapters": False, "output": None}
    return ExportOptions(run_dir=Path("-runs/r"), **(nothing | asked)).arguments()


def test_what_was_not_asked_for_is_left_to_the_process():
    assert arguments() == ["--", "-runs/r"]


def test_what_was_asked_for_is_passed_on():
    asked = arguments(step=0, adapters=True, output=Path("--odd"))
    assert asked == ["--step=0", "--output=--odd", "--adapters", "--", "-runs/r"]
