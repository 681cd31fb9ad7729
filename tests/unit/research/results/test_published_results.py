"""The published numbers are those of the published records, and documents tell them."""

from __future__ import annotations

import bz2
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from research.cells.cell import claims_cells, plane_cells, tuning_cells
from research.cells.records import LOG_WEIGHT_QUANTILES, table_records
from research.results.taken_rate import taken_rate
from research.study import cell_spec, load_study

ROOT = Path(__file__).parents[4]
DOCS, STUDIES = ROOT / "docs", ROOT / "examples" / "studies"
REPORTS = {
    folder: json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for folder in (DOCS, DOCS / "ablation")
}
"""The published numbers by the folder of their report."""
RESULTS = REPORTS[DOCS]
FOLDERS = {name: folder for folder, report in REPORTS.items() for name in report["studies"]}
"""The folder of the report that has a study, by the study's name."""

SMALL_STUDY = "countdown-baselines"
README_STUDY = "sort-long"
README_COLUMNS = ("k = 0", "k = 32", "safe decades")
"""Columns of the README's table, after that of the method's name."""


def test_the_command_computes_the_published_numbers_from_the_published_records(tmp_path):
    name, folder = SMALL_STUDY, FOLDERS[SMALL_STUDY]
    (file,) = STUDIES.rglob(f"{name}.yaml")
    records = tmp_path / "results" / name / "cells.jsonl.bz2"
    records.parent.mkdir(parents=True)
    shutil.copy(folder / "results" / name / records.name, records)
    command = [sys.executable, "-m", "research", file, "--report-only", "--output", tmp_path]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    computed = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert computed["studies"][name] == REPORTS[folder]["studies"][name]
    assert {path.name for path in records.parent.iterdir()} == {
        path.name for path in (folder / "results" / name).iterdir()
    }


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_every_cell_that_a_published_study_asks_for_has_been_run(name):
    (file,) = STUDIES.rglob(f"{name}.yaml")
    study, found = load_study(file).spec, REPORTS[FOLDERS[name]]["studies"][name]
    rates = {each["method"]: each["learning_rate"] for each in found["tuned"] if each["chosen"]}
    cells = [*tuning_cells(study), *plane_cells(study), *claims_cells(study, rates)]
    assert found["cells"] == len({cell.name for cell in cells})


def test_the_published_records_take_at_most_8_mb():
    tables = (folder / "results" / name / "cells.jsonl.bz2" for name, folder in FOLDERS.items())
    assert sum(table.stat().st_size for table in tables) <= 8e6


def _readme_row(method: str, title: str) -> list[str]:
    """A row of the README's table, from the published numbers alone."""
    return [title, *(_readme_cell(method, column) for column in README_COLUMNS)]


def _readme_cell(method: str, column: str) -> str:
    found = RESULTS["studies"][README_STUDY]
    if column == "safe decades":
        safe = {x["lag"]: x["decades"] for x in found["safe"] if x["method"] == method}
        return f"{safe[found['headline']['lag']]:.2f}"
    claims = {x["lag"]: x for x in found["claims"] if x["method"] == method}
    return _spread(claims[int(column.removeprefix("k = "))])


def _share(collapse: dict[str, int]) -> str:
    return f"{collapse['count']} of {collapse['trials']}"


def _spread(found: dict[str, float], digits: int = 2) -> str:
    mean, deviation = found["final_accuracy_mean"], found["final_accuracy_std"]
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def _readme_rows() -> list[list[str]]:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| sorting"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_readme_shows_every_method_of_the_study():
    study = load_study(STUDIES / f"{README_STUDY}.yaml").spec
    assert _readme_rows() == [_readme_row(each.name, each.label) for each in study.methods]


def test_long_runs_tune_to_a_lower_rate_than_others_in_all_methods_but_one():
    rates = {
        name: {each["method"]: each["learning_rate"] for each in found["tuned"] if each["chosen"]}
        for name, found in RESULTS["studies"].items()
    }
    long_runs = rates.pop("countdown-k128")
    assert long_runs.pop("vcpo-batch") == 1e-4
    assert set(long_runs.values()) == {3e-5}
    assert {rate for each in rates.values() for rate in each.values()} == {1e-4}


def test_the_runbook_tells_how_far_the_alarm_can_be_trusted():
    page = DOCS / "runbooks/off-policy/VCPOCollapseImminent.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    found = RESULTS["alarms"]["critical"]
    assert (
        f"{found['num_warned']} of {found['num_collapses']} collapses were critical first" in text
    )
    assert f"{found['lead_steps']:.0f} steps ahead in the median" in text
    assert f"{100 * found['false_alarm_rate']:.1f} % of the" in text


@pytest.mark.parametrize(
    ("region", "pessimism", "per_group", "per_batch"),
    [
        ("no", "no", "vcpo", "vcpo-batch"),
        ("no", "yes", "vcpo-pessimistic", "vcpo2-no-region"),
        ("yes", "no", "vcpo-region", "vcpo2-no-pessimism"),
        ("yes", "yes", "vcpo2-group", "vcpo2"),
    ],
)
def test_the_discussion_shows_every_combination_of_the_parts(
    region, pessimism, per_group, per_batch
):
    report = REPORTS[FOLDERS["sort-long-parts"]]
    plane = {
        (each["method"], each["learning_rate"]): _spread(each)
        for each in report["studies"]["sort-long-parts"]["plane"]
        if each["lag"] == 32
    }
    shown = [plane[method, rate] for method in (per_group, per_batch) for rate in (1e-4, 3e-4)]
    row = f"| {' | '.join([region, pessimism, *shown])} |"
    discussion = DOCS / "design" / "024-study-results.md"
    assert row in discussion.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("reinforce-batch", "REINFORCE, sequence TIS 8, one mean for the batch"),
        ("rloo-sqrt", "`vcpo`, mean of the other answers of the group"),
        ("vcpo-leave-one-out", "`vcpo`, optimal baseline of the other answers of the group"),
        ("vcpo-shrunk", "`vcpo`, baseline of the group shrunk toward the batch's"),
        ("vcpo-batch", "`vcpo`, one baseline per batch"),
        ("vcpo-batch-clip", "the same, weights, clip and average of M2PO"),
        ("vcpo-batch-refuse", "the same, no step below half of the on-policy ratio"),
        ("vcpo-batch-beta2", "the same, AdamW's β₂ 0.999 in place of 0.95"),
        ("vcpo2", "`vcpo2`"),
        ("vcpo2-shrunk", "`vcpo2`, baseline of the group shrunk toward the batch's"),
        ("vcpo2-clip", "`vcpo2`, weights, clip and average of M2PO"),
        ("vcpo2-refuse", "`vcpo2`, no step below half of the on-policy ratio"),
        ("vcpo2-beta2", "`vcpo2`, AdamW's β₂ 0.999 in place of 0.95"),
        ("vcpo2-clip-shrunk", "`vcpo2`, shrunk, and M2PO's weights, clip and average"),
        ("vcpo2-all", "`vcpo2`, all four"),
    ],
)
def test_the_discussion_shows_what_else_was_tried(method, title):
    plane = {
        (each["lag"], each["learning_rate"]): _spread(each)
        for each in REPORTS[FOLDERS["sort-long-parts"]]["studies"]["sort-long-parts"]["plane"]
        if each["method"] == method
    }
    row = f"| {title} | {plane[0, 1e-4]} | {plane[32, 1e-4]} | {plane[32, 3e-4]} |"
    discussion = DOCS / "design" / "024-study-results.md"
    assert row in discussion.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("vcpo2", "`vcpo2`"),
        ("vcpo2-held", "`vcpo2`, rate held at step 48"),
        ("vcpo-batch", "`vcpo`, one baseline per batch"),
        ("reinforce-region", "REINFORCE, trust region"),
    ],
)
def test_the_discussion_shows_the_controls(method, title):
    plane = {
        (each["lag"], each["learning_rate"]): _spread(each, digits=3)
        for each in REPORTS[FOLDERS["sort-long-controls"]]["studies"]["sort-long-controls"]["plane"]
        if each["method"] == method
    }
    shown = [plane[lag, rate] for lag in (8, 32) for rate in (1e-4, 3e-4)]
    discussion = DOCS / "design" / "024-study-results.md"
    row = f"| {' | '.join([title, *shown])} |"
    assert row in discussion.read_text(encoding="utf-8").splitlines()


def test_the_discussion_has_the_gap_to_the_control_and_its_rates():
    (table,) = (DOCS / "ablation" / "results").glob("sort-long-controls/cells.jsonl.bz2")
    heads, *columns = map(json.loads, bz2.decompress(table.read_bytes()).splitlines())
    finals: dict[tuple[Any, ...], float] = {}
    kept: dict[int, list[float]] = {8: [], 32: []}
    for cell, rates in zip(heads, dict(columns)["learning_rate"], strict=True):
        last = [accuracy for step, accuracy in cell["evaluations"] if step > 0.75 * 384]
        place = cell["lag"], cell["learning_rate"], cell["seed"]
        finals[cell["method"], *place] = sum(last) / len(last)
        if cell["method"] == "vcpo2-held" and cell["lag"] > 0 and cell["learning_rate"] == 3e-4:
            kept[cell["lag"]].append(max(rates[48:]))
    places = [place for method, *place in finals if method == "vcpo2-held" and place[0] > 0]
    gaps = [finals["vcpo2", *place] - finals["vcpo2-held", *place] for place in places]
    mean = statistics.fmean(gaps)
    reach = 2.201 * statistics.stdev(gaps) / len(gaps) ** 0.5  # Student's t, 11 degrees of freedom
    page = " ".join((DOCS / "design" / "024-study-results.md").read_text(encoding="utf-8").split())
    assert len(gaps) == 12
    assert f"is {mean:.3f} ({mean - reach:.3f} to {mean + reach:.3f}) over the twelve" in page
    shown = {
        lag: f"{min(all_) * 1e4:.1f}e-4 to {max(all_) * 1e4:.1f}e-4" for lag, all_ in kept.items()
    }
    assert f"keep {shown[32]} on sorting at k = 32, and {shown[8]} at k = 8" in page


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("vcpo", "`vcpo`: group"),
        ("vcpo-leave-one-out", "`vcpo`: the others of the group"),
        ("vcpo-shrunk", "`vcpo`: shrunk"),
        ("vcpo-batch", "`vcpo`: batch"),
        ("vcpo2-shrunk", "`vcpo2`: shrunk"),
        ("vcpo2", "`vcpo2`: batch"),
        ("vcpo2-clip-shrunk", "`vcpo2`: shrunk, M2PO's clip"),
        ("vcpo2-all", "`vcpo2`: the same, refused steps, β₂ 0.999"),
    ],
)
def test_the_page_of_the_shrunk_baseline_shows_both_tasks(method, title):
    shown = {
        (name, each["lag"], each["learning_rate"]): _spread(each)
        for name in ("sort-long-parts", "countdown-baselines")
        for each in REPORTS[FOLDERS[name]]["studies"][name]["plane"]
        if each["method"] == method
    }
    cells = [
        shown[name, *place]
        for name in ("sort-long-parts", "countdown-baselines")
        for place in ((0, 1e-4), (32, 1e-4), (32, 3e-4))
    ]
    page = DOCS / "design" / "093-trust-region.md"
    assert f"| {' | '.join([title, *cells])} |" in page.read_text(encoding="utf-8").splitlines()


SHORT_TITLES = {
    "reinforce": "REINFORCE, sequence TIS 8",
    "grpo": "GRPO, token clip 0.2",
    "m2po": "M2PO",
    "vcpo": "`vcpo`",
    "vcpo-batch": "`vcpo`, one baseline per batch",
    "vcpo2": "`vcpo2`",
}
"""Names of methods on the pages of the design."""


def _claims_of_sorting(method: str) -> dict[int, dict[str, Any]]:
    claims = RESULTS["studies"]["sort-long"]["claims"]
    return {each["lag"]: each for each in claims if each["method"] == method}


@pytest.mark.parametrize("method", SHORT_TITLES)
def test_the_discussion_shows_what_a_lag_does_to_each_method(method):
    claims = _claims_of_sorting(method)
    stale = claims[32]
    lowest, highest = (
        stale["log_weights"][LOG_WEIGHT_QUANTILES.index(0.01)],
        stale["log_weights"][-1],
    )
    cells = (
        SHORT_TITLES[method],
        f"{claims[0]['final_accuracy_mean']:.2f}",
        _spread(stale),
        _share(stale["collapse"]),
        f"{stale['ess_median']:.0f}, {stale['ess_low']:.0f}",
        f"{lowest:.1f}, {highest:.1f}",
    )
    discussion = DOCS / "design" / "024-study-results.md"
    assert f"| {' | '.join(cells)} |" in discussion.read_text(encoding="utf-8").splitlines()


SAFE_PLACES = (
    *(("sort-long", lag) for lag in (8, 32)),
    *(("countdown", lag) for lag in (8, 32)),
    ("countdown-k128", 128),
    ("tool", 32),
)
"""Studies and lags of the discussion's table of safe rates, by column."""


def _safe_decades(method: str, study: str, lag: int) -> str:
    (safe,) = (
        each
        for each in RESULTS["studies"][study]["safe"]
        if (each["method"], each["lag"]) == (method, lag)
    )
    is_cut = safe["range"] is not None and safe["range"]["is_cut"]
    return f"{'≥ ' if is_cut else ''}{safe['decades']:.2f}, {safe['own_decades']:.2f}"


@pytest.mark.parametrize("method", SHORT_TITLES)
def test_the_discussion_shows_how_wide_the_safe_rates_of_each_method_are(method):
    cells = (SHORT_TITLES[method], *(_safe_decades(method, *place) for place in SAFE_PLACES))
    discussion = DOCS / "design" / "024-study-results.md"
    assert f"| {' | '.join(cells)} |" in discussion.read_text(encoding="utf-8").splitlines()


def test_rates_recomputed_from_ess_ratios_are_those_that_were_recorded():
    (file,) = STUDIES.rglob("sort-long-controls.yaml")
    study, folder = load_study(file).spec, DOCS / "ablation" / "results" / "sort-long-controls"
    compared = 0
    for record in table_records(folder / "cells.jsonl.bz2"):
        if record.steps.learning_rate is None or record.method == "vcpo2-held":
            continue
        place = {name: getattr(record, name) for name in ("lag", "learning_rate", "seed")}
        spec = cell_spec(study, study.method(record.method), **place)
        without = replace(record, steps=replace(record.steps, learning_rate=None))
        assert taken_rate(spec, without) == pytest.approx(taken_rate(spec, record), rel=0.01)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("p3o", "P3O"),
        ("dppo", "DPPO, total variation 0.2"),
        ("trm", "TRM, sequence mask"),
        ("vcpo2", "`vcpo2`"),
    ],
)
def test_the_discussion_shows_newer_losses_at_every_rate(method, title):
    found = REPORTS[DOCS / "ablation"]["studies"]["sort-long-rows"]
    finals = {
        (each["lag"], each["learning_rate"]): f"{each['final_accuracy_mean']:.2f}"
        for each in found["plane"]
        if each["method"] == method
    }
    places = ((0, 1e-4), (32, 3e-5), (32, 1e-4), (32, 3e-4))
    row = f"| {' | '.join([title, *(finals[place] for place in places)])} |"
    discussion = DOCS / "design" / "024-study-results.md"
    assert row in discussion.read_text(encoding="utf-8").splitlines()
    (chosen,) = (each for each in found["tuned"] if each["method"] == method and each["chosen"])
    assert chosen["learning_rate"] == 1e-4


@pytest.mark.parametrize("method", SHORT_TITLES)
def test_the_page_of_the_trust_region_shows_every_rate_and_the_collapses(method):
    rates = [
        f"{each['final_accuracy_mean']:.3f}"
        for each in RESULTS["studies"]["sort-long"]["plane"]
        if (each["method"], each["lag"]) == (method, 32)
    ]
    collapses = _share(_claims_of_sorting(method)[32]["collapse"])
    page = DOCS / "design" / "093-trust-region.md"
    row = f"| {' | '.join([SHORT_TITLES[method], *rates, collapses])} |"
    assert row in page.read_text(encoding="utf-8").splitlines()


def test_the_discussion_tells_at_which_lags_the_warning_comes():
    by_lag = RESULTS["alarms_by_lag"]
    stale = [found["critical"] for lag, found in by_lag.items() if int(lag) >= 8]
    fresh = [found["critical"] for lag, found in by_lag.items() if int(lag) < 8]
    text = " ".join((DOCS / "design/024-study-results.md").read_text(encoding="utf-8").split())
    for found, words in (
        ([RESULTS["alarms"]["critical"]], "collapses had a `critical` before them"),
        (stale, "at lags of 8 or more"),
        (fresh, "at lags of 0 and 2"),
    ):
        num_warned = sum(each["num_warned"] for each in found)
        num_collapses = sum(each["num_collapses"] for each in found)
        assert f"{num_warned} of {num_collapses} {words}" in text


def _finals_of_condition(name: str) -> dict[int, dict[str, float]]:
    """Final accuracy by lag and method, a mean over seeds, from the published records alone."""
    table = DOCS / "results" / name / "cells.jsonl.bz2"
    heads = json.loads(bz2.decompress(table.read_bytes()).splitlines()[0])
    finals: dict[tuple[int, str], list[float]] = {}
    for cell in heads:
        last = cell["evaluations"][-1][0]
        late = [accuracy for step, accuracy in cell["evaluations"] if step > 0.75 * last]
        finals.setdefault((cell["lag"], cell["method"]), []).append(statistics.fmean(late))
    found: dict[int, dict[str, float]] = {}
    for (lag, method), accuracies in finals.items():
        found.setdefault(lag, {})[method] = statistics.fmean(accuracies)
    return found


@pytest.mark.parametrize("name", sorted(RESULTS.get("conditions", {})))
def test_a_condition_is_won_where_no_accuracy_of_another_makes_that_of_the_default_unlikely(name):
    (file,) = STUDIES.rglob(f"{name}.yaml")
    spec = load_study(file).spec
    prompts = spec.run.evaluation.prompts
    chances = []
    for finals in _finals_of_condition(name).values():
        right = round(finals.pop("vcpo2") * prompts)
        # Of so many prompts no more right answers, at the accuracy of the other.
        chances += [
            sum(
                math.comb(prompts, count) * other**count * (1 - other) ** (prompts - count)
                for count in range(right + 1)
            )
            for other in finals.values()
        ]
    assert len(chances) == len(spec.lags) * (len(spec.methods) - 1)
    assert RESULTS["conditions"][name]["is_won"] == (min(chances) >= 0.025)


@pytest.mark.parametrize("name", sorted(RESULTS.get("conditions", {})))
def test_what_a_lag_leaves_is_the_quotient_of_two_published_accuracies(name):
    finals = _finals_of_condition(name)
    for row in RESULTS["conditions"][name]["rows"]:
        if row["lag"] > 0 and 0 in finals:
            without = finals[0][row["method"]]
            assert row["kept"] == pytest.approx(finals[row["lag"]][row["method"]] / without)
        else:
            assert row["kept"] is None


def test_the_wins_are_counted_over_all_conditions():
    found = [each["is_won"] for each in RESULTS.get("conditions", {}).values()]
    assert RESULTS.get("wins", 0) == found.count(True)


@pytest.mark.parametrize("name", sorted(RESULTS.get("conditions", {})))
def test_the_discussion_shows_every_condition(name):
    rows_of_lags = RESULTS["conditions"][name]["rows"]
    lag = max(each["lag"] for each in rows_of_lags)
    found = {each["method"]: each for each in rows_of_lags if each["lag"] == lag}
    own = found["vcpo2"]
    shown = [f"{found[method]['final_accuracy']:.3f}" for method in ("grpo", "vcpo", "vcpo-batch")]
    shown.append(f"{own['final_accuracy']:.3f} ({own['low']:.3f} to {own['high']:.3f})")
    rows = (DOCS / "design" / "024-study-results.md").read_text(encoding="utf-8").splitlines()
    assert any(row.endswith(f" | {' | '.join(shown)} |") for row in rows)
