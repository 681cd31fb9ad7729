"""Batches on which no step can be taken: they are dropped, and three in a row end the run."""

import pytest

from tests.fixtures.learner.dispatcher import work_request
from vcpo.records.journal import read_events, read_metrics
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase


def break_begin(learner, times, error=None):
    """Let the first gradients fail; return the leases of their batches."""
    begin, broken = learner.update.begin, []

    def begin_or_fail(groups, *, policy_version):
        if len(broken) < times:
            broken.append({each.lease_id for group in groups for each in group})
            raise error or ValueError("odd")
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_or_fail
    return broken


def dropped(tmp_path):
    return [event.message for event in read_events(tmp_path) if event.kind == "GroupsDropped"]


async def test_a_batch_that_breaks_the_update_is_dropped_and_the_run_goes_on(
    make_learner, tmp_path
):
    learner = make_learner(steps=3)
    broken = break_begin(learner, 2)
    assert await learner.run() is RunPhase.COMPLETE
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {"quarantined": 8})
    for ids, message in zip(broken, dropped(tmp_path), strict=True):
        assert message.startswith("ValueError: odd; these groups are not trained on: ")
        assert all(lease_id in message for lease_id in ids)


async def test_the_third_broken_batch_in_a_row_ends_the_run_with_the_reason(make_learner, tmp_path):
    learner = make_learner(steps=3)
    break_begin(learner, 3, MemoryError("large"))
    with pytest.raises(StartError, match=r"failed on 3 batches in a row.*MemoryError: large"):
        await learner.run()
    assert len(dropped(tmp_path)) == 3


async def test_a_step_that_broke_after_it_changed_something_ends_the_learner(make_learner):
    learner = make_learner(steps=3)
    break_begin(learner, 1)
    learner.update.is_whole = False
    with pytest.raises(ValueError, match="odd"):
        await learner.run()


async def test_a_response_beside_the_batch_that_breaks_the_step_costs_the_batch_nothing(
    make_learner, tmp_path
):
    learner = make_learner(steps=3)
    learner.update.wanted_fresh_tokens, finish, refused = 10**6, learner.update.finish, []

    def finish_or_fail(newest=()):
        if newest:
            refused.append(newest)
            raise ValueError("odd")
        return finish(newest)

    learner.update.finish = finish_or_fail
    learner.accept(*await learner.dispatcher.lease(work_request(), wait_s=0))
    assert await learner.run() is RunPhase.COMPLETE
    assert refused
    assert not dropped(tmp_path)
