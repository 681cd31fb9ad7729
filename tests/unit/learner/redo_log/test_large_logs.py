"""Logs that are larger than memory, or grow faster than the checkpoints of a run's spec."""

import asyncio
import tracemalloc
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.fixtures.learner.dispatcher import ManualClock, make_ledger, make_trajectory
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.redo_log.file import LogFile, Row, file_path
from vcpo_learner.redo_log.log import RedoLog

STEPS = 40
TOKENS = 4_000
"""Of each response; a step has 2 groups of 2."""


def long_response(lease, number, version):
    span = VersionSpan(policy_version=version, num_tokens=TOKENS)
    one = make_trajectory(lease.lease_id, number, reward=float(number))
    tokens, logprobs = tuple(range(TOKENS)), (-0.5 - version,) * TOKENS
    return replace(one, response_token_ids=tokens, rollout_logprobs=logprobs, version_spans=(span,))


async def nothing(step):
    pass


async def train(log, *, steps=STEPS, between=nothing):
    """Take steps on long responses; the first response of each step calibrated it."""
    ledger = make_ledger(ManualClock(), log=log)
    for version in range(steps):
        for lease in ledger.grant("w", num_groups=2, policy_version=version):
            for number in range(2):
                ledger.submit(lease.lease_id, [long_response(lease, number, version)])
        batch = ledger.take_batch(policy_version=version, max_policy_lag_steps=0)
        fresh = batch[0].trajectories[:1]
        ledger.record_step(batch, policy_version=version, fresh=fresh)
        await log.wait_until_kept()
        await between(version + 1)
    return ledger


@pytest.fixture
def large_log(tmp_path):
    async def fill():
        with closing(RedoLog(tmp_path, limit_bytes=1 << 40)) as log:
            ledger = await train(log)
            # An accepted response of the next step waits.
            (lease,) = ledger.grant("w", num_groups=1, policy_version=STEPS)
            ledger.submit(lease.lease_id, [long_response(lease, 0, STEPS)])
            await log.wait_until_kept()

    asyncio.run(fill())
    return tmp_path


def test_a_redo_needs_far_less_memory_than_its_log_has_bytes(large_log):
    log = RedoLog(large_log, limit_bytes=1 << 40)
    log_bytes = log._progress.size_bytes
    assert log_bytes > STEPS * 4 * TOKENS * 6
    ledger = make_ledger(ManualClock(), incarnation="later")
    tracemalloc.start()
    try:
        steps = log.redo(ledger, after=0).steps
        for version, logged in sorted(steps.items()):
            step = log.read_step(logged)
            batch = [one for group in step.groups for one in group.trajectories]
            assert [len(one.response_token_ids) for one in batch] == 4 * [TOKENS]
            assert {one.rollout_logprobs[-1] for one in batch} == {-0.5 - version}
            assert list(step.fresh) == batch[:1]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        log.close()
    assert len(steps) == STEPS
    assert ledger.counts().buffered == 1
    # Less than six of the steps.
    assert peak_bytes < log_bytes * 6 / STEPS


def test_steps_that_a_rollback_undid_give_their_groups_back_from_the_log(tmp_path):
    async def fill():
        with closing(RedoLog(tmp_path, limit_bytes=1 << 40)) as log:
            ledger = await train(log, steps=3)
            redo_of = make_ledger(ManualClock(), incarnation="later")
            steps = log.redo(redo_of, after=0).steps
            ledger.roll_back(
                1, [one for version in (1, 2) for one in log.read_step(steps[version]).groups]
            )
            # What step 2 was trained on has no later token, and is trained on again.
            batch = ledger.take_batch(policy_version=1, max_policy_lag_steps=0)
            ledger.record_step(batch, policy_version=1, fresh=())
            await log.wait_until_kept()
            return [group.trajectories for group in batch]

    expected = asyncio.run(fill())
    with closing(RedoLog(tmp_path, limit_bytes=1 << 40)) as log:
        ledger = make_ledger(ManualClock(), incarnation="last")
        steps = log.redo(ledger, after=0).steps
        assert log.take_events() == []
        assert sorted(steps) == [0, 1]
        assert [group.trajectories for group in log.read_step(steps[1]).groups] == expected


async def test_checkpoints_that_follow_the_log_keep_it_below_its_limit(tmp_path):
    limit_bytes = 20 * 4 * TOKENS * 7
    log, largest, saved = RedoLog(tmp_path, limit_bytes=limit_bytes), 0, []

    async def save_if_due(step):
        nonlocal largest
        largest = max(largest, log._progress.size_bytes)
        if log.is_checkpoint_due:
            saved.append(step)
            log.add_checkpoint(step, log.position, kept_steps=set(saved[-2:]))
            while log.is_checkpoint_due:
                await asyncio.sleep(0.001)

    with closing(log):
        await train(log, between=save_if_due)
        assert log.take_events() == []
    # A step has at most 7 bytes for each token here, so a quarter of the limit is five or six.
    assert {later - earlier for earlier, later in pairwise(saved)} <= {5, 6}
    assert limit_bytes / 4 < largest < limit_bytes * 0.85


def test_the_oldest_checkpoints_go_where_their_changes_fill_half_of_the_log(tmp_path):
    file = LogFile(file_path(tmp_path))
    file.append([Row(position=one, data=b"x" * 100) for one in range(1, 11)])
    file.add_checkpoint(10, 1, kept_steps={10}, most_bytes=1000)
    file.add_checkpoint(20, 3, kept_steps={10, 20}, most_bytes=1000)
    assert file.checkpoints == ((10, 1), (20, 3))
    # 7 changes after step 20, 9 after step 10.
    file.add_checkpoint(30, 5, kept_steps={10, 20, 30}, most_bytes=700)
    assert file.checkpoints == ((20, 3), (30, 5))
    # The newest stays, whatever follows it.
    file.add_checkpoint(40, 6, kept_steps={20, 30, 40}, most_bytes=100)
    assert file.checkpoints == ((40, 6),)
    file.close()
