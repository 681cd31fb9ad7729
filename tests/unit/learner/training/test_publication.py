"""Versions are published beside the steps, in order and whole."""

import asyncio
import threading

import pytest

from tests.fixtures.learner.training import MemoryLog, TrainingFixture
from tests.fixtures.rollout.policy_versions import weight_files
from vcpo.records.journal import read_events, read_metrics
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1.ledger_pb2 import VersionPublished
from vcpo_learner.ledger.changes import LogRoom
from vcpo_learner.training import publication
from vcpo_rollout.weights.fetcher import WeightFetcher

DEADLINE_S = 30.0


def published_versions(learner, look=lambda policies, prepared: None):
    """The versions in the order of their announcement; `look` sees the store after each."""
    policies = learner.policies
    publish, seen = policies.publish, []

    def observed(prepared):
        publish(prepared)
        seen.append(prepared.manifest.policy_version)
        look(policies, prepared)

    policies.publish = observed
    return seen


async def test_the_next_step_begins_while_a_version_is_prepared(make_learner):
    learner = make_learner(algorithm={"maxPolicyLagSteps": 4})
    policies = learner.policies
    prepare, begin = policies.prepare, learner.update.begin
    stepping, in_time = threading.Event(), []

    def prepare_late(version, weights):
        if version == 1:  # what step 2 trains on was sampled before
            in_time.append(stepping.wait(DEADLINE_S))
        return prepare(version, weights)

    def watched_begin(groups, *, policy_version):
        if policy_version == 1:
            stepping.set()
        return begin(groups, policy_version=policy_version)

    policies.prepare, learner.update.begin = prepare_late, watched_begin
    seen = published_versions(learner)
    await learner.run()
    assert in_time == [True]
    assert seen == [0, 1, 2, 3]


async def test_every_version_that_is_announced_can_be_fetched_with_its_checksums(make_learner):
    learner, fetching = make_learner(), []

    def fetch(_, prepared):
        fetching.append(prepared.manifest)

    seen = published_versions(learner, fetch)
    await learner.run()
    newest = await WeightFetcher(weight_files()).fetch(fetching[-1])  # others may be replaced
    assert newest.policy_version == seen[-1] == 3


async def test_a_version_is_compared_only_after_the_one_before_was_announced(make_learner):
    learner = make_learner()
    seen = published_versions(learner)
    published, before = learner.published_state, []
    take = published.take

    def watched(precision):
        before.append(list(seen))
        return take(precision)

    published.take = watched
    await learner.run()
    assert before == [[], [0], [0, 1], [0, 1, 2]]


class LogOnAFullDisk(MemoryLog):
    """Nothing of version 2 can be written."""

    def append(self, change):
        if isinstance(change, VersionPublished) and change.policy_version == 2:
            self.room = LogRoom.UNWRITABLE

    async def wait_until_kept(self):
        if self.room is LogRoom.UNWRITABLE:
            await asyncio.Event().wait()


async def test_a_last_version_that_a_full_disk_keeps_back_ends_the_evaluation_beside_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(publication, "_POLL_S", 0.01)
    sections = {
        "steps": 2,
        "evaluation": {"everySteps": 1},
    }
    learner = TrainingFixture(tmp_path, log=LogOnAFullDisk(), **sections)
    dispatcher = learner.dispatcher
    evaluate = dispatcher.evaluate

    async def evaluate_late(step, *, exclusive):
        if not exclusive:  # its workers wait for the answers to submissions
            await asyncio.Event().wait()
        return await evaluate(step, exclusive=exclusive)

    dispatcher.evaluate = evaluate_late
    async with asyncio.timeout(DEADLINE_S):
        assert await learner.run() is RunPhase.COMPLETE
    assert [each.step for each in read_metrics(tmp_path).evaluations] == [0]
    told = [each for each in read_events(tmp_path) if each.kind == "EvaluationWithoutResult"]
    assert len(told) == 2  # beside step 2, and at the end


async def test_a_last_version_that_a_full_disk_keeps_back_is_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(publication, "_POLL_S", 0.01)
    sections = {"steps": 2}
    learner = TrainingFixture(tmp_path, log=LogOnAFullDisk(), **sections)
    assert await learner.run() is RunPhase.COMPLETE
    assert [each.step for each in read_metrics(tmp_path).evaluations] == [0]
    (told,) = [each for each in read_events(tmp_path) if each.kind == "EvaluationWithoutResult"]
    assert told.message.startswith("step 2: the redo log has no room")


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_a_version_that_cannot_be_published_ends_the_run(make_learner, version):
    learner = make_learner()
    policies = learner.policies
    prepare = policies.prepare

    def broken(policy_version, weights):
        if policy_version == version:
            raise MemoryError("no room for a delta")
        return prepare(policy_version, weights)

    policies.prepare = broken
    with pytest.raises(MemoryError, match="no room for a delta"):
        await learner.run()
