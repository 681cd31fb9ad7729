"""A cell's file is complete or absent, and valid only for its settings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from tests.fixtures.study import cell, record
from vcpo_study.cells.records import CellStore


@pytest.fixture
def store(tmp_path):
    return CellStore(tmp_path)


def finish(one):
    return replace(record(accuracies=(0.25, 0.5)), digest=one.digest)


def test_a_saved_cell_is_read_back_equal(store):
    store.save(cell(), finish(cell()))
    assert store.load(cell()) == finish(cell())
    assert store.holds(cell())


def test_a_cell_that_was_never_run_is_not_held(store):
    assert store.load(cell()) is None
    assert not store.holds(cell())


def test_a_file_of_other_settings_does_not_count(store):
    store.save(cell(), replace(record(), digest="of other settings"))
    assert store.load(cell()) is None
    assert not store.holds(cell())


def test_nothing_half_written_stays(store, tmp_path):
    store.save(cell(), finish(cell()))
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [f"{cell().name}.jsonl"]


def test_a_cell_that_was_interrupted_is_not_stored(store, tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell().name}.partial").write_text('{"kind": "cell"')
    assert not store.holds(cell())


def test_an_error_is_kept_until_the_cell_succeeds(store):
    store.save_error(cell(), "out of memory")
    assert store.error(cell()) == "out of memory"
    store.save(cell(), finish(cell()))
    assert store.error(cell()) is None


def test_a_cell_of_an_older_version_is_read_with_its_diagnostics(store, tmp_path):
    new = finish(cell())
    store.save(cell(), new)
    (path,) = (tmp_path / "cells").iterdir()
    first, *rest = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    flat = {"token_ess_ratio": 0.9, "kl_per_token": 0.01, "top_gradient_share": None}
    kept = {"kind", "step", "reward_mean", "ess", "ess_ratio", "on_policy_ess_ratio", "skipped"}
    old = [
        {key: value for key, value in row.items() if key in kept} | flat
        if row["kind"] == "step"
        else row
        for row in rest
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [first, *old]), encoding="utf-8")
    read = store.load(cell())
    assert [row.step for row in read.steps] == [row.step for row in new.steps]
    assert read.steps[0].diagnostics == flat
    assert read.steps[0].kl_per_token == 0.01


def test_a_cell_keeps_every_number_of_an_update(store):
    number = {"learning_rate": 2e-5, "masked_share": 0.25, "ess_by_lag": {"4": 0.5}}
    row = replace(finish(cell()).steps[0], **number)
    store.save(cell(), replace(finish(cell()), steps=(row,)))
    assert asdict(store.load(cell()).steps[0]) == asdict(row)
