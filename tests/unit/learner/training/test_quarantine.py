"""Groups that break an update are found, stored, and never trained on again."""

import json
from errno import ENOSPC

import pytest

from tests.unit.learner.training.groups import make_group
from vcpo_learner.training.quarantine import Quarantine

IDS = ["train-now-1", "train-now-2"]


def test_a_group_is_kept_where_people_can_read_what_was_in_it(tmp_path):
    quarantine = Quarantine(tmp_path / "quarantine")
    kept = make_group(3, response_token_ids=(99,), reward=0.25)
    path = quarantine.keep(
        kept.lease_id,
        kept.trajectories,
        prompt_index=kept.prompt_index,
        reason="IndexError: index out of range",
        step=7,
    )
    document = json.loads(path.read_text())
    assert path.name == "train-now-3.json"
    assert (document["prompt_index"], document["step"]) == (13, 7)
    assert document["reason"] == "IndexError: index out of range"
    (first, _) = document["trajectories"]
    assert (first["response_token_ids"], first["reward"]) == ([99], 0.25)
    assert first["version_spans"] == [{"policy_version": 0, "num_tokens": 1, "key_age_versions": 0}]
    assert len(path.read_text().splitlines()) == 11
    assert Quarantine(tmp_path / "quarantine").excluded_lease_ids() == {"train-now-3"}


def test_a_step_that_is_over_leaves_nothing(tmp_path):
    quarantine = Quarantine(tmp_path)
    quarantine.begin_step(IDS)
    quarantine.end_step(IDS)
    assert list(tmp_path.iterdir()) == []
    assert Quarantine(tmp_path).excluded_lease_ids() == frozenset()


def test_a_second_death_in_a_step_with_a_group_is_one_too_many(tmp_path):
    Quarantine(tmp_path).begin_step(IDS)
    first = Quarantine(tmp_path)
    assert first.excluded_lease_ids() == frozenset()
    assert first.deaths("train-now-1") == 1
    first.begin_step(["train-now-2", "train-now-3"])
    second = Quarantine(tmp_path)
    assert second.excluded_lease_ids() == {"train-now-2"}
    assert second.deaths("train-now-2") == 2


def test_steps_in_between_that_went_well_forgive_only_the_groups_they_were_taken_on(tmp_path):
    Quarantine(tmp_path).begin_step(IDS)
    again = Quarantine(tmp_path)
    for lease_ids in (["train-now-2"], ["train-now-5"]):
        again.begin_step(lease_ids)
        again.end_step(lease_ids)
    assert (again.deaths("train-now-1"), again.deaths("train-now-2")) == (1, 0)
    again.begin_step(["train-now-1"])
    assert Quarantine(tmp_path).excluded_lease_ids() == {"train-now-1"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"under_way": 3, "deaths": {}}'])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path, content):
    (tmp_path / "step.json").write_text(content)
    assert Quarantine(tmp_path).excluded_lease_ids() == frozenset()


def test_a_full_disk_costs_the_note_and_not_the_step(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(ENOSPC, "No space left on device")

    quarantine = Quarantine(tmp_path)
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    quarantine.begin_step(IDS)
    quarantine.end_step(IDS)
