"""The figures of docs/layout.json: hand counts on small files, and drift of the recorded ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from scripts.layout_figures import (
    ROOT,
    caller_figures,
    drift,
    over_bar,
    short_one_caller,
    spec_fields,
)

FIRST = """
def offer():
    return _once() + _twice() + _twice() + _shared()

def _once():
    "One reference, one line."
    return 1

def _twice():
    return 2

def _shared():
    return _long()

def _long():
    a = 1
    b = 2
    c = 3
    d = 4
    return a + b + c + d

def __not_counted():
    return 0
"""
SECOND = """
from first import _once

class Thing:
    def _shared(self):
        return self._never

    def run(self):
        return self._shared()
"""


def write_modules(folder: Path) -> list[Path]:
    (folder / "first.py").write_text(FIRST)
    (folder / "second.py").write_text(SECOND)
    return [folder / "first.py", folder / "second.py"]


def test_private_functions_and_their_callers_are_counted_as_by_hand(tmp_path):
    # Private: _once, _twice, _shared, _long and the method _shared. By package _once and _long
    # have one reference, both _shared two; by module each _shared has one.
    assert caller_figures(write_modules(tmp_path)) == {
        "private_functions": 5,
        "one_caller": 2,
        "one_caller_share": 0.4,
        "one_caller_share_in_module": 0.8,
    }


def test_only_functions_of_at_most_four_lines_are_proposed_for_inlining(tmp_path):
    write_modules(tmp_path)
    assert [name for _, _, name in short_one_caller(tmp_path)] == ["_once"]


def test_a_model_inside_a_list_counts_by_its_fields():
    class Inner(BaseModel):
        first: int
        second: str | None

    class Outer(BaseModel):
        inner: list[Inner] | None
        labels: dict[str, str]

    assert spec_fields(Outer) == 3


def test_lines_may_move_by_a_twentieth_shares_by_two_hundredths_and_folders_by_two_files():
    recorded = {"product_lines": 1000, "one_caller_share": 0.5, "largest_folder": 9, "fields": 7}
    near = {"product_lines": 1050, "one_caller_share": 0.48, "largest_folder": 11, "fields": 7}
    assert drift(recorded, near) == []
    far = {"product_lines": 949, "one_caller_share": 0.53, "largest_folder": 12, "fields": 8}
    assert len(drift(recorded, far)) == 4


def test_a_figure_that_passes_its_bar_is_named_unless_it_has_none():
    figures = {"packages": {"vcpo": {"largest_folder": 16}, "tests": {"largest_folder": 90}}}
    assert over_bar(figures) == ["packages.vcpo.largest_folder"]


def test_a_figure_may_come_below_its_bar_and_not_pass_it():
    assert drift({"over_bar": ["a", "b"]}, {"over_bar": ["b"]}) == []
    assert len(drift({"over_bar": ["b"]}, {"over_bar": ["a", "b"]})) == 1


def test_the_recorded_figures_are_those_of_the_tree():
    command = [sys.executable, str(ROOT / "scripts" / "layout_figures.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
