"""The README's figures of the study are those of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from vcpo.report.numbers import compact

ROOT = Path(__file__).parents[4]
RESULTS = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
STUDY = YAML(typ="safe").load((ROOT / "examples" / "study.yaml").read_text(encoding="utf-8"))
TITLES = {method["name"]: method["title"] for method in STUDY["spec"]["methods"]}


def _cell(method: str, lag: int) -> dict[str, Any]:
    return next(row for row in RESULTS["grid"] if (row["method"], row["lag"]) == (method, lag))


def _row(method: str) -> tuple[str, ...]:
    """A row of the README's table, from the study's numbers alone."""
    return (
        TITLES[method],
        f"{_cell(method, 0)['final_accuracy_mean']:.3f}",
        f"{_cell(method, 128)['final_accuracy_mean']:.3f}",
        f"{_cell(method, 32)['steps_to_target']:.0f}",
    )


def _readme_rows() -> list[tuple[str, ...]]:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| final accuracy"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def test_the_readme_shows_every_method_that_was_run_at_the_rate_of_vcpo():
    rate = _cell("vcpo", 0)["learning_rate"]
    at_one_rate = [name for name in TITLES if _cell(name, 0)["learning_rate"] == rate]
    assert sorted(_readme_rows()) == sorted(map(_row, at_one_rate))


def test_the_results_tell_the_learning_rate_beside_what_it_gave():
    document = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name, title in TITLES.items():
        rate = compact(_cell(name, 0)["learning_rate"])
        kept = _cell(name, 128)["final_accuracy_mean"] / _cell(name, 0)["final_accuracy_mean"]
        assert f"| {title} | {rate} | {kept:.3f} |" in document
