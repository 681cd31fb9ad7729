"""The way from `vcpo study` to the study's process."""

from __future__ import annotations

from pathlib import Path

from vcpo.local.study import StudyOptions

NOTHING_ASKED = {
    "directory": None,
    "output": None,
    "jobs": None,
    "methods": (),
    "lags": (),
    "report_only": False,
}


def arguments(**asked):
    return StudyOptions(file=Path("s.yaml"), **(NOTHING_ASKED | asked)).arguments()


def test_what_was_not_asked_for_is_left_to_the_process():
    assert arguments() == ["s.yaml"]


def test_paths_and_numbers_are_passed_on():
    asked = arguments(directory=Path("--odd"), output=Path("docs"), jobs=3)
    assert asked == ["s.yaml", "--dir=--odd", "--output=docs", "--jobs=3"]


def test_repeated_options_stay_repeated():
    asked = arguments(methods=("a", "b"), lags=(0, 8), report_only=True)
    assert asked == ["s.yaml", "--only=a", "--only=b", "--lags=0", "--lags=8", "--report-only"]
