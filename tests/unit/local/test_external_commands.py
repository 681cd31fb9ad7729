"""The arguments that `vcpo export` and `vcpo study` pass to their processes."""

from __future__ import annotations

from pathlib import Path

from vcpo.local.external_commands import ExportOptions, StudyOptions
from vcpo.records.exported_model import ExportDtype

STUDY_DEFAULTS = {
    "files": (Path("s.yaml"),),
    "output": None,
    "jobs": None,
    "hours": None,
    "parts": (),
    "methods": (),
    "lags": (),
    "report_only": False,
}


def export_arguments(**given):
    defaults = {"directory": None, "step": None, "best": False, "adapters": False}
    return ExportOptions(source=Path("-runs/r"), **(defaults | given)).arguments()


def study_arguments(**given):
    return StudyOptions(**(STUDY_DEFAULTS | given)).arguments()


def test_export_passes_no_option_that_was_not_given():
    assert export_arguments() == ["--", "-runs/r"]


def test_export_passes_every_option_that_was_given():
    arguments = export_arguments(
        step=0, best=True, adapters=True, dtype=ExportDtype.FLOAT32, directory=Path("--odd")
    )
    options = ["--best", "--adapters", "--step=0", "--dtype=float32"]
    assert arguments == [*options, "--", "-runs/r", "--odd"]


def test_study_passes_no_option_that_was_not_given():
    assert study_arguments() == ["s.yaml"]


def test_study_passes_paths_and_numbers():
    arguments = study_arguments(output=Path("--odd"), jobs=3, hours=0.5)
    assert arguments == ["s.yaml", "--output=--odd", "--jobs=3", "--hours=0.5"]


def test_study_repeats_repeated_options():
    files = (Path("a.yaml"), Path("b.yaml"))
    arguments = study_arguments(
        files=files, parts=("plane",), methods=("a", "b"), lags=(0, 8), report_only=True
    )
    assert arguments == [
        *["a.yaml", "b.yaml", "--part=plane", "--only=a", "--only=b", "--lags=0", "--lags=8"],
        "--report-only",
    ]
