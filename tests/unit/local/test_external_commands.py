"""The arguments that `vcpo export` and `vcpo study` pass to their processes."""

from __future__ import annotations

from pathlib import Path

from vcpo.local.external_commands import ExportOptions, StudyOptions

STUDY_DEFAULTS = {
    "directory": None,
    "output": None,
    "jobs": None,
    "methods": (),
    "lags": (),
    "report_only": False,
}


def export_arguments(**given):
    defaults = {"directory": None, "step": None, "best": False, "adapters": False}
    return ExportOptions(source=Path("-runs/r"), **(defaults | given)).arguments()


def study_arguments(**given):
    return StudyOptions(file=Path("s.yaml"), **(STUDY_DEFAULTS | given)).arguments()


def test_export_passes_no_option_that_was_not_given():
    assert export_arguments() == ["--", "-runs/r"]


def test_export_passes_every_option_that_was_given():
    arguments = export_arguments(step=0, best=True, adapters=True, directory=Path("--odd"))
    assert arguments == ["--best", "--adapters", "--step=0", "--", "-runs/r", "--odd"]


def test_study_passes_no_option_that_was_not_given():
    assert study_arguments() == ["s.yaml"]


def test_study_passes_paths_and_numbers():
    arguments = study_arguments(directory=Path("--odd"), output=Path("docs"), jobs=3)
    assert arguments == ["s.yaml", "--dir=--odd", "--output=docs", "--jobs=3"]


def test_study_repeats_repeated_options():
    arguments = study_arguments(methods=("a", "b"), lags=(0, 8), report_only=True)
    assert arguments == ["s.yaml", "--only=a", "--only=b", "--lags=0", "--lags=8", "--report-only"]
