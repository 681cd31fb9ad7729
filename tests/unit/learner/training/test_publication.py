"""Versions are published beside the steps, in order and whole."""

import threading

import pytest

from tests.fixtures.rollout.policy_versions import weight_files
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
