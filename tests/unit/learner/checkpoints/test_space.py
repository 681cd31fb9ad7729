"""Room for checkpoints, judged before a run."""

import pytest

from tests.fixtures.learner.dispatcher import make_run
from vcpo_learner.checkpoints.disk import SpaceNeed, lacks_one_checkpoint, space_warning

GIB = 1 << 30
NEED = SpaceNeed(checkpoint_bytes=84 * GIB, num_checkpoints=4, model_bytes=28 * GIB)
"""Together 364 GiB."""


def test_with_room_for_everything_there_is_nothing_to_say():
    assert space_warning(NEED, free_bytes=364 * GIB, held_bytes=0) is None
    assert space_warning(NEED, free_bytes=196 * GIB, held_bytes=168 * GIB) is None


def test_what_is_missing_is_said_in_numbers_with_the_fields():
    said = space_warning(NEED, free_bytes=100 * GIB, held_bytes=84 * GIB)
    assert said.startswith(
        "100.0 GiB are free and 180.0 GiB are missing for 4 checkpoints of 84.0 GiB each"
    )
    assert "the model of 28.0 GiB" in said
    assert "lower spec.checkpoint.keep" in said


@pytest.mark.parametrize(("free_gib", "lacks"), [(83, True), (84, False)])
def test_one_checkpoint_must_fit(free_gib, lacks):
    assert lacks_one_checkpoint(NEED, free_bytes=free_gib * GIB) is lacks


@pytest.mark.parametrize(
    ("checkpoint", "health", "gibibytes"),
    [
        # 7e9 x (12 x n + 4) bytes and two redo logs of 4 GiB, in GiB, rounded up; n checkpoints,
        # the one being written too.
        ({}, {}, 348),  # n = 2 + best + 1
        ({"redoLogGibibytes": 1}, {}, 342),
        ({"keep": 1, "keepBest": False}, {"rollBackOn": "never"}, 191),  # 1 + 1
        ({"keep": 1, "keepBest": False}, {}, 269),  # one from before beside the newest: 2 + 1
        ({"everySteps": 5}, {}, 426),  # younger than 10 + lag limit of 1: three, best + 1
    ],
)
def test_the_volume_has_room_for_what_is_kept(checkpoint, health, gibibytes):
    model = {"name": "m", "sizeBillions": 7}
    run = make_run(model=model, checkpoint=checkpoint, health=health)
    assert run.spec.checkpoint_storage_gibibytes == gibibytes


@pytest.mark.parametrize(("redo_log_gibibytes", "gibibytes"), [(4, 50), (30, 60)])
def test_without_a_size_of_the_model_a_large_log_makes_a_large_volume(
    redo_log_gibibytes, gibibytes
):
    run = make_run(checkpoint={"redoLogGibibytes": redo_log_gibibytes})
    assert run.spec.checkpoint_storage_gibibytes == gibibytes
