"""The numbers of README and the results page are those of the records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from research.app import check_pages
from research.claims import check, facts_of

ROOT = Path(__file__).resolve().parents[3]


def test_every_number_of_the_pages_is_computed_from_the_records():
    lines = []
    assert check_pages(ROOT, lines.append), lines
    found = json.loads(lines[-1])
    assert (found["numbers"] >= 50, found["differ"]) == (True, 0)


@pytest.mark.parametrize(
    ("page", "before", "after", "problem"),
    [
        ("README.md", "0.60 ± 0.33", "0.61 ± 0.33", "does not say: | REINFORCE"),
        ("docs/results.md", "| 3 of 10 |", "| 2 of 10 |", "does not say: | sorting | 0.015"),
        ("docs/results.md", "\n\n## How", " So 9 of 9 are won.\n\n## How", "no fact: 9"),
        ("docs/results.md", "cells ran on", "ran on", "cells ran on"),
    ],
)
def test_a_number_that_is_not_of_the_records_is_told(tmp_path, page, before, after, problem):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/results.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert before in text
    (tmp_path / page).write_text(text.replace(before, after), encoding="utf-8")
    facts = facts_of(json.loads((ROOT / "research" / "results.json").read_text(encoding="utf-8")))
    _, problems = check(tmp_path, facts)
    assert any(each.startswith(page) and problem in each for each in problems)
