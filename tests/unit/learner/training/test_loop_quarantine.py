"""The training loop when a group breaks the update or ends the learner."""

import json
import time
from dataclasses import replace
from itertools import chain

import pytest

from tests.fixtures.learner.dispatcher import make_trajectory, work_request
from tests.fixtures.learner.models import PAD, VOCABULARY
from vcpo.records.journal import read_events, read_metrics
from vcpo.wire.phase import RunPhase
from vcpo.wire.versions import step_of
from vcpo_learner.training.quarantine import Quarantine
from vcpo_learner.update.policy_update import PolicyUpdate


async def test_a_group_that_breaks_the_update_is_dropped_stored_and_reported_and_the_run_continues(
    make_learner, tmp_path
):
    learner = make_learner(
        update_of=lambda model, spec: PolicyUpdate(model, spec, PAD),
        learner={"maxMismatchNats": 100.0},
    )
    poison, *others = await learner.dispatcher.lease(work_request(room=4), wait_s=0)
    learner.accept(poison, response_token_ids=(VOCABULARY,))
    learner.accept(*others)
    assert await learner.run() is RunPhase.COMPLETE
    (event,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert f"{poison.lease_id} (prompt 0) is not trained on: IndexError" in event.message
    kept = tmp_path / "quarantine" / f"{poison.lease_id}.json"
    assert str(kept) in event.message
    document = json.loads(kept.read_text())
    assert document["trajectories"][0]["response_token_ids"] == [VOCABULARY]
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {"quarantined": 2})
    assert list(kept.parent.iterdir()) == [kept]


class KilledError(BaseException):
    """Stands in for a signal that no process survives: nobody handles it."""


async def test_groups_that_a_learner_died_with_twice_are_left_out_though_the_checkpoint_holds_them(
    make_learner, tmp_path
):
    def make_it_die(learner):
        begin = learner.update.begin

        def begin_step(groups, *, policy_version):
            if step_of(policy_version) == 1:
                raise KilledError
            while learner.accepted() < 8:  # so that the next batch is in the checkpoint
                time.sleep(0.001)
            return begin(groups, policy_version=policy_version)

        learner.update.begin = begin_step
        return learner

    async def dies():
        learner = make_it_die(make_learner(checkpoint={"everySteps": 1}))
        learner.training.resume()
        with pytest.raises(KilledError):
            await learner.run()

    await dies()
    await dies()
    assert not any(event.kind == "GroupQuarantined" for event in read_events(tmp_path))
    later = make_learner(checkpoint={"everySteps": 1})
    assert later.training.resume() == 1
    assert later.dispatcher.ledger.counts().dropped["quarantined"] == 4
    told = [event.message for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert len(told) == 2
    assert all("the learner died 2 times in a step with it" in message for message in told)
    assert await later.run() is RunPhase.COMPLETE
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


async def test_what_is_in_quarantine_is_left_out_of_every_checkpoint_that_holds_it(
    make_learner, tmp_path
):
    first = make_learner()
    first.accept(*await first.dispatcher.lease(work_request(room=4), wait_s=0))
    batch = first.dispatcher.ledger.take_batch(step=0, max_policy_lag_steps=1)
    Quarantine(tmp_path / "quarantine").keep(
        batch[0].lease_id, batch[0].trajectories, prompt_index=0, reason="it was odd", step=0
    )
    first.dispatcher.ledger.return_batch(batch)
    first.drain()
    await first.training.run(drain_s=0)
    later = make_learner()
    later.training.resume()
    assert later.dispatcher.ledger.counts().dropped["quarantined"] == 2
    assert not any(event.kind == "GroupQuarantined" for event in read_events(tmp_path))


REPLAYING = {
    "update_of": lambda model, spec: PolicyUpdate(model, spec, PAD),
    "algorithm": {"method": "tba", "maxPolicyLagSteps": 1, "onPolicyProbability": 0.5},
    "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "promptPool": 9},
    "learner": {"maxMismatchNats": 100.0},
}


async def test_a_replayed_response_that_breaks_the_update_is_discarded_stored_and_reported(
    make_learner, tmp_path
):
    learner = make_learner(**REPLAYING)
    poison = replace(make_trajectory("train-past-1", 0), response_token_ids=(VOCABULARY,))
    learner.update.draw([[poison]])
    assert await learner.run() is RunPhase.COMPLETE
    (event,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert event.message.startswith("train-past-1 (kept for replay) is not trained on: IndexError")
    document = json.loads((tmp_path / "quarantine" / "train-past-1.json").read_text())
    assert document["prompt_index"] is None
    assert document["trajectories"][0]["response_token_ids"] == [VOCABULARY]
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {})


async def test_a_replay_that_a_learner_died_with_twice_is_not_restored(make_learner, tmp_path):
    def held_lease_ids(learner):
        kept = chain.from_iterable(learner.update.state_dict()["replay"]["held"])
        return [one["trajectory_id"].rpartition("/")[0] for one in kept]

    first = make_learner(**REPLAYING)
    first.update.draw([[replace(make_trajectory("train-past-1", 0), response_token_ids=(9,))]])
    await first.run(until_step=1)
    assert "train-past-1" in held_lease_ids(first)
    for _ in range(2):
        Quarantine(tmp_path / "quarantine").begin_step(["train-past-1"])
    for _ in range(2):
        later = make_learner(**REPLAYING)
        assert later.training.resume() == 1
        assert set(held_lease_ids(later)) == set(held_lease_ids(first)) - {"train-past-1"}
    (event,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert "the learner died 2 times in a step with it" in event.message
    assert (tmp_path / "quarantine" / "train-past-1.json").exists()
