"""A cell's file is complete or absent, and valid only for its settings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.fixtures.study import cell, record, steps
from vcpo.service.lifecycle import StartError
from vcpo_study.cells.records import LOG_WEIGHT_QUANTILES, CellStore, model_identity


@pytest.fixture
def store(tmp_path):
    return CellStore(tmp_path / "cells", model="tiny")


def with_steps(columns):
    return replace(record(), steps=columns)


def test_a_saved_cell_is_read_back(store):
    plain = {"learning_rate_scale": (0.5,) * 10}
    saved = with_steps(steps(10, **plain))
    store.save(cell(), saved)
    assert store.load(cell()) == saved
    assert store.holds(cell())


def test_a_number_of_a_step_keeps_five_digits_and_a_log_weight_three_decimals(store):
    third = tuple(-1 / 3 for _ in LOG_WEIGHT_QUANTILES)
    store.save(cell(), with_steps(steps(1, kl_per_token=(2 / 3e4,), log_weights=(third,))))
    read = store.load(cell()).steps
    assert read.kl_per_token == (6.6667e-5,)
    assert read.log_weights == ((-0.333,) * len(LOG_WEIGHT_QUANTILES),)


def test_an_accuracy_is_kept_exactly(store):
    store.save(cell(), record(accuracies=[1 / 3, 0.123456789]))
    assert [each.accuracy for each in store.load(cell()).evaluations] == [1 / 3, 0.123456789]


def test_a_step_whose_weights_have_no_value_is_read_back(store):
    nothing = {"ess": (None,), "kl_per_token": (None,), "log_weights": (None,)}
    saved = with_steps(
        steps(1, ess_ratio=(0.0,), learning_rate_scale=(0.0,), skipped={1: "why"}, **nothing)
    )
    store.save(cell(), saved)
    assert store.load(cell()) == saved


def test_a_weight_of_zero_is_read_back(store):
    weights = (-math.inf, *([0.0] * (len(LOG_WEIGHT_QUANTILES) - 1)))
    store.save(cell(), with_steps(steps(1, log_weights=(weights,))))
    assert store.load(cell()).steps.log_weights == (weights,)


def test_a_record_of_384_noisy_steps_takes_less_than_14_kb(store, tmp_path):
    draw = random.Random(0)
    ess = tuple(draw.uniform(1, 128) for _ in range(384))
    columns = {
        "reward_mean": tuple(draw.randrange(129) / 128 for _ in range(384)),
        "response_tokens_mean": tuple(draw.randrange(1280) / 128 for _ in range(384)),
        "ess": ess,
        "ess_ratio": tuple(each / 128 for each in ess),
        "kl_per_token": tuple(draw.random() for _ in range(384)),
        "gradient_norm": tuple(draw.random() for _ in range(384)),
        "learning_rate_scale": tuple(draw.random() for _ in range(384)),
        "log_weights": tuple(
            tuple(sorted(draw.gauss(0, 1) for _ in LOG_WEIGHT_QUANTILES)) for _ in range(384)
        ),
    }
    assert cell().spec.batch.trajectories == 128
    store.save(cell(), with_steps(steps(384, **columns)))
    (path,) = (tmp_path / "cells").iterdir()
    assert path.stat().st_size < 14_000


def test_a_cell_that_was_never_run_is_not_held(store):
    assert store.load(cell()) is None
    assert not store.holds(cell())


def test_a_file_of_other_settings_does_not_count(store, tmp_path):
    store.save(cell(), record())
    (path,) = (tmp_path / "cells").iterdir()
    path.rename(tmp_path / "cells" / f"{cell(seed=2).name}.json.xz")
    assert store.load(cell(seed=2)) is None
    assert not store.holds(cell(seed=2))


def test_a_file_of_another_model_does_not_count(store, tmp_path):
    store.save(cell(), record())
    other = CellStore(tmp_path / "cells", model="larger")
    assert other.load(cell()) is None
    assert not other.holds(cell())


def test_nothing_half_written_stays(store, tmp_path):
    store.save(cell(), record())
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [f"{cell().name}.json.xz"]


def test_a_file_that_is_no_record_is_named(store, tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell().name}.json.xz").write_bytes(b"<<<<<<< ours")
    with pytest.raises(StartError, match=rf"{cell().name}.*delete it to run the cell again"):
        store.holds(cell())


def test_an_error_is_kept_until_the_cell_succeeds(store):
    store.save_error(cell(), "out of memory")
    assert store.error(cell()) == "out of memory"
    store.save(cell(), record())
    assert store.error(cell()) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_is_known_by_the_content_of_its_files(tmp_path, name):
    for each in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / each).write_text("first")
    before = model_identity(str(tmp_path), None)
    (tmp_path / "README.md").write_text("other")
    assert model_identity(str(tmp_path), None) == before
    (tmp_path / name).write_text("other")
    assert model_identity(str(tmp_path), None) != before


def test_a_model_of_the_hub_is_known_by_name_and_revision():
    assert model_identity("org/model", None) == "org/model"
    assert model_identity("org/model", "v2") == "org/model@v2"
