"""A cell's file is complete or absent, and valid only for its settings."""

from dataclasses import replace

import pytest

from research.cells.records import CellStore, model_identity
from tests.fixtures.study import cell, record, steps
from vcpo.service.lifecycle import StartError


@pytest.fixture
def store(tmp_path):
    return CellStore(tmp_path, model="tiny")


@pytest.mark.parametrize("columns", [steps(10), steps(1, ess_ratio=(0.0,), ess=(None,))], ids=str)
def test_a_saved_cell_is_read_back_whose_weights_may_have_no_value(store, columns):
    saved = replace(record(), steps=columns)
    store.save(cell(), saved)
    assert store.load(cell()) == saved
    assert store.holds(cell())


CELLS = [cell(), cell(seed=2), cell("plain")]


def record_of(one):
    place = {"seed": one.seed, "learning_rate": one.learning_rate}
    return record(one.method, one.lag, **place)


@pytest.fixture
def packed(store):
    """The store, with the records of the first two cells packed."""
    for one in CELLS[:2]:
        store.save(one, record_of(one))
    store.pack(CELLS)
    return store


def test_packed_records_are_one_file(packed, tmp_path):
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["cells.jsonl.bz2"]
    assert [packed.holds(one) for one in CELLS] == [True, True, False]


def test_a_cell_that_is_run_again_counts_before_its_packed_record_and_is_packed_over_it(packed):
    again = replace(record_of(CELLS[1]), cpu_s=3.0)
    packed.save(CELLS[1], again)
    assert packed.load(CELLS[1]) == again
    packed.pack(CELLS)
    assert packed.load(CELLS[1]).cpu_s == 3.0


def test_records_are_packed_with_those_packed_before(packed):
    packed.save(CELLS[2], record_of(CELLS[2]))
    packed.pack(CELLS)
    assert all(packed.holds(one) for one in CELLS)
    assert packed.load(CELLS[0]) == record_of(CELLS[0])


def test_a_file_of_other_settings_does_not_count(store, tmp_path):
    store.save(cell(), record())
    (path,) = (tmp_path / "cells").iterdir()
    path.rename(tmp_path / "cells" / f"{cell(seed=2).name}.json")
    assert not store.holds(cell(seed=2))


def test_records_of_another_model_count_only_where_the_model_is_not_here(packed, tmp_path):
    assert CellStore(tmp_path, model=None).holds(CELLS[0])
    assert not CellStore(tmp_path, model="larger").holds(CELLS[0])


def test_a_file_that_is_no_record_is_named(store, tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell().name}.json").write_bytes(b"<<<<<<< ours")
    with pytest.raises(StartError, match=rf"{cell().name}.*delete it to run its cells again"):
        store.holds(cell())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_is_known_by_the_content_of_its_files(tmp_path, name):
    for each in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / each).write_text("first")
    before = model_identity(str(tmp_path), None)
    (tmp_path / "README.md").write_text("other")
    assert model_identity(str(tmp_path), None) == before
    (tmp_path / name).write_text("other")
    assert model_identity(str(tmp_path), None) != before
