"""Cells' files: whole or not there, and only for the settings they were made with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.study import cell, record
from vcpo_study.records import CellStore


@pytest.fixture
def store(tmp_path):
    return CellStore(tmp_path)


def finished(one):
    return replace(record(accuracies=(0.25, 0.5)), digest=one.digest)


def test_a_saved_cell_is_read_back_equal(store):
    store.save(cell(), finished(cell()))
    assert store.load(cell()) == finished(cell())
    assert store.holds(cell())


def test_a_cell_that_was_never_run_is_not_held(store):
    assert store.load(cell()) is None
    assert not store.holds(cell())


def test_a_file_of_other_settings_does_not_count(store):
    store.save(cell(), replace(record(), digest="of other settings"))
    assert store.load(cell()) is None
    assert not store.holds(cell())


def test_nothing_half_written_stays(store, tmp_path):
    store.save(cell(), finished(cell()))
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [f"{cell().name}.jsonl"]


def test_a_cell_that_was_cut_off_is_not_held(store, tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell().name}.partial").write_text('{"kind": "cell"')
    assert not store.holds(cell())


def test_an_error_is_kept_until_the_cell_succeeds(store):
    store.save_error(cell(), "out of memory")
    assert store.error(cell()) == "out of memory"
    store.save(cell(), finished(cell()))
    assert store.error(cell()) is None
