"""The table of families: how cells and rows are judged, kept and read back, and a short run."""

import json
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_families.__main__ import main
from benchmarks.model_families.families import FAMILIES
from benchmarks.model_families.table import (
    COLUMNS,
    NOT_RUN,
    Cell,
    Table,
    Verdict,
    judge,
    judge_row,
    read,
    updated,
    worsened,
    write_page,
)

BY_NAME = {column.name: column for column in COLUMNS}
RIGHT = Cell(verdict=Verdict.AGREES, value=2e-7)
WRONG = Cell(verdict=Verdict.WRONG, value=0.14)
CRASHED = Cell(verdict=Verdict.WRONG, reason="its process ended; see above")
REFUSED = Cell(
    verdict=Verdict.REFUSED,
    reason="spec.batch.rowLayout: packed, but the model lets trajectories in one row see each"
    " other, which is a reason of more than a line of the page; use padded",
)


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("hf", 9.9e-5, Verdict.AGREES),
        ("hf", 1.1e-4, Verdict.WRONG),
        ("norms", 9.9e-4, Verdict.AGREES),
        ("hf", float("nan"), Verdict.WRONG),
    ],
)
def test_a_number_is_right_up_to_the_limit_of_its_column(name, value, verdict):
    assert judge(BY_NAME[name], value).verdict is verdict


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({"hf": RIGHT, "packed": REFUSED}, Verdict.AGREES),
        ({"hf": REFUSED, "vllm": RIGHT}, Verdict.AGREES),
        ({"hf": RIGHT, "LoRA": WRONG}, Verdict.WRONG),
        ({"hf": RIGHT, "ranks": CRASHED}, Verdict.WRONG),
        ({"hf": REFUSED, "vllm": NOT_RUN, "padded": RIGHT}, Verdict.REFUSED),
        ({"hf": NOT_RUN}, Verdict.NOT_RUN),
    ],
)
def test_a_row_is_wrong_if_a_cell_is_and_agrees_if_an_engine_does(row, verdict):
    assert judge_row(row) is verdict


def test_a_page_is_read_as_it_was_written(tmp_path):
    table = Table(
        rows={
            "qwen3": {**dict.fromkeys(BY_NAME, NOT_RUN), "hf": RIGHT, "packed": REFUSED},
            "phi3 (LongRoPE)": {**dict.fromkeys(BY_NAME, NOT_RUN), "hf": WRONG, "vllm": CRASHED},
            "gpt2": {**dict.fromkeys(BY_NAME, NOT_RUN), "hf": RIGHT, "packed": REFUSED},
        }
    )
    write_page(table, tmp_path / "models.md")
    page = (tmp_path / "models.md").read_text()
    assert read(page) == table
    assert max(len(line) for line in page.splitlines()) <= 118
    assert page.count("use padded") == 1


def test_cells_that_a_run_did_not_measure_stay_and_rows_keep_the_order_of_the_families():
    before = Table(rows={"gpt2": {"hf": WRONG, "vllm": RIGHT}, "gone": {"hf": RIGHT}})
    measured = Table(rows={"llama": {"hf": RIGHT}, "gpt2": {"hf": RIGHT}})
    after = updated(before, measured, ["llama", "gpt2", "not reached"])
    assert list(after.rows.items()) == [
        ("llama", {"hf": RIGHT}),
        ("gpt2", {"hf": RIGHT, "vllm": RIGHT}),
    ]


def test_a_cell_that_was_right_and_is_wrong_or_refused_is_worse_and_no_other_is():
    before = Table(rows={"a": {"hf": RIGHT, "vllm": RIGHT, "padded": WRONG, "LoRA": REFUSED}})
    after = Table(
        rows={
            "a": {"hf": WRONG, "vllm": REFUSED, "padded": WRONG, "LoRA": WRONG},
            "b": {"hf": WRONG},
        }
    )
    assert worsened(before, after) == ["a: hf", "a: vllm"]


def test_families_have_names_of_their_own_and_are_causal_models_of_transformers():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names) >= 60
    assert {family.model_type for family in FAMILIES} <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def run_main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["model_families", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_two_families_are_judged_and_a_cell_that_has_become_wrong_fails(
    monkeypatch, capsys, tmp_path
):
    page = tmp_path / "models.md"
    given = ("--columns", "hf", "--page", str(page))
    assert run_main(monkeypatch, *given, "--families", "qwen3,mamba") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["families"], found["agree"], found["refused_names"]) == (2, 1, ["mamba"])
    page.write_text(page.read_text().replace("| mamba | refused (1) |", "| mamba | 2e-07 |"))
    assert run_main(monkeypatch, *given, "--families", "mamba") == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["wrong"], found["worsened"]) == (0, ["mamba: hf"])
