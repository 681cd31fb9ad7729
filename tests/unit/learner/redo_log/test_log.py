"""The redo log beside an event loop: commits, a full disk, a limit, and what is left of damage."""

import asyncio
import sqlite3
import threading

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_ledger,
    make_trajectories,
    make_trajectory,
)
from vcpo.service.lifecycle import StartError
from vcpo_learner.ledger.changes import LogRoom, TrajectoriesAccepted, VersionPublished
from vcpo_learner.redo_log.file import aside_path, file_path
from vcpo_learner.redo_log.log import RedoLog


@pytest.fixture
def open_log(tmp_path):
    logs = []

    def open_log(*, limit_bytes=1 << 30, retry_s=0.01):
        log = RedoLog(tmp_path, limit_bytes=limit_bytes, retry_s=retry_s)
        logs.append(log)
        return log

    yield open_log
    for log in logs:
        log.close()


def accept_groups(log, count, *, incarnation="now"):
    ledger = make_ledger(ManualClock(), incarnation=incarnation, log=log)
    for lease in ledger.grant("w", num_groups=count, policy_version=0):
        ledger.submit(lease.lease_id, make_trajectories(lease))
    return ledger


def redone(log):
    ledger = make_ledger(ManualClock(), incarnation="later")
    log.redo(ledger.contents, after=0)
    return ledger


async def test_what_was_committed_is_redone_by_the_next_process(open_log):
    log = open_log()
    before = accept_groups(log, 3)
    await log.committed()
    log.close()
    after = redone(open_log())
    assert after.counts() == before.counts()
    assert after.snapshot().groups == before.snapshot().groups


async def test_a_commit_takes_all_that_arrived_during_the_one_before(open_log):
    log, commits, may_go = open_log(), [], threading.Event()
    append = log._file.append

    def append_slowly(rows):
        commits.append([row.position for row in rows])
        may_go.wait()
        append(rows)

    log._file.append = append_slowly
    ledger = make_ledger(ManualClock(), log=log)
    ledger.grant("w", num_groups=1, policy_version=0)
    while not commits:
        await asyncio.sleep(0)
    ledger.grant("w", num_groups=3, policy_version=0)
    may_go.set()
    await log.committed()
    assert commits == [[1], [2, 3, 4]]


async def test_a_full_disk_loses_nothing_and_lets_nobody_believe_that_it_was_written(open_log):
    log = open_log()
    with files_of_at_most(1):
        ledger = accept_groups(log, 2)
        waiting = asyncio.create_task(log.committed())
        while log.room is not LogRoom.UNWRITABLE:
            await asyncio.sleep(0.001)
        assert not waiting.done()
    await waiting
    assert log.room is LogRoom.FREE
    assert [kind for kind, _ in log.take_events()] == ["DiskFull", "DiskHasRoom"]
    log.close()
    assert redone(open_log()).counts() == ledger.counts()


@pytest.mark.parametrize("name", ["append", "sync", "add_checkpoint", "remove_some"])
async def test_a_write_that_fails_once_stops_no_work_for_longer(open_log, monkeypatch, name):
    monkeypatch.setattr("vcpo_learner.redo_log.log._SYNC_S", 0.0)
    log = open_log()
    write, errors = getattr(log._file, name), [OSError("the disk is away")]

    def fails_once(*arguments, **options):
        if errors:
            raise errors.pop()
        return write(*arguments, **options)

    monkeypatch.setattr(log._file, name, fails_once)
    accept_groups(log, 1)
    log.add_checkpoint(1, log.position, kept_steps={1})
    told = []
    async with asyncio.timeout(10):
        while len(told) < 2:
            told += [kind for kind, _ in log.take_events()]
            await asyncio.sleep(0.001)
    assert told == ["DiskFull", "DiskHasRoom"]
    assert log.room is LogRoom.FREE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "error",
    [
        sqlite3.DatabaseError("database disk image is malformed"),
        sqlite3.IntegrityError("UNIQUE constraint failed: change.position"),
    ],
)
async def test_a_file_that_no_room_makes_whole_is_not_written_again(open_log, monkeypatch, error):
    log = open_log()

    def fails(rows):
        raise error

    monkeypatch.setattr(log._file, "append", fails)
    accept_groups(log, 1)
    async with asyncio.timeout(10):
        with pytest.raises(type(error)):
            await log.committed()
        with pytest.raises(type(error)):  # who waits for a batch learns of it too
            await dispatcher_fixture(log=log).dispatcher.next_batch()
    assert log.take_events() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_commits_whose_file_was_removed_are_not_believed_to_be_written(
    open_log, monkeypatch, tmp_path
):
    monkeypatch.setattr("vcpo_learner.redo_log.log._SYNC_S", 0.0)
    log = open_log()
    file_path(tmp_path).with_name(f"{file_path(tmp_path).name}-wal").unlink()
    accept_groups(log, 1)
    async with asyncio.timeout(10):
        with pytest.raises(FileNotFoundError):
            await dispatcher_fixture(log=log).dispatcher.next_batch()


async def test_a_log_on_a_full_disk_can_be_closed(open_log):
    log = open_log(retry_s=60.0)
    with files_of_at_most(1):
        accept_groups(log, 1)
        while log.room is not LogRoom.UNWRITABLE:
            await asyncio.sleep(0.001)
        log.close()


async def test_a_full_log_has_room_again_after_a_checkpoint(open_log):
    log = open_log(limit_bytes=200)
    accept_groups(log, 4)
    await log.committed()
    assert log.room is LogRoom.FULL
    log.add_checkpoint(1, log.position, kept_steps={1})
    while log.room is LogRoom.FULL:
        await asyncio.sleep(0.001)
    assert [kind for kind, _ in log.take_events()] == ["LogFull", "LogHasRoom"]


async def test_a_damaged_log_gives_what_comes_before_the_damage_and_goes_on_from_there(
    open_log, tmp_path
):
    log = open_log()
    accept_groups(log, 2)  # two grants, two submissions
    await log.committed()
    log.close()
    tables = sqlite3.connect(file_path(tmp_path))
    tables.execute("UPDATE change SET data = x'00' WHERE position = 4")
    tables.commit()
    tables.close()
    later = open_log()
    ledger = redone(later)
    assert (ledger.counts().buffered, ledger.counts().in_flight) == (2, 2)
    ((kind, message),) = later.take_events()
    assert kind == "LogDamaged"
    assert "change 4 differs from its checksum; the 3 changes before it are used" in message
    assert aside_path(file_path(tmp_path)).exists()
    assert later.position == 3
    later.close()
    last = open_log()
    assert redone(last).counts() == ledger.counts()
    assert last.take_events() == []


async def test_a_change_that_does_not_fit_the_ledger_ends_the_redo(open_log):
    log = open_log()
    ledger = accept_groups(log, 1)
    ledger.record_step([], policy_version=0, fresh=())
    await log.committed()
    log.close()
    tables = open_log()
    other = make_ledger(ManualClock(), incarnation="later")
    tables.redo(other.contents, after=1)  # without the grant, the submission has no lease
    assert tables.position == 1
    ((kind, message),) = tables.take_events()
    assert (kind, "train-now-0 is not open" in message) == ("LogDamaged", True)


async def test_a_change_that_cannot_be_encoded_leaves_no_gap(open_log):
    log = open_log()
    ledger = accept_groups(log, 1)
    with pytest.raises(ValueError, match="range"):
        log.append(VersionPublished(policy_version=-1, checksum=0))
    ledger.grant("w", num_groups=1, policy_version=0)
    await log.committed()
    log.close()
    reopened = open_log()
    assert redone(reopened).counts() == ledger.counts()
    assert reopened.take_events() == []


async def test_a_log_that_numbers_the_responses_of_every_lease_from_0_is_redone(open_log):
    log = open_log()
    group_of_4 = {"trajectories_per_prompt": 4}
    before = make_ledger(ManualClock(), incarnation="first", log=log, **group_of_4)
    (first,) = before.grant("w", num_groups=1, policy_version=0)
    before.submit(first.lease_id, [make_trajectory(first.lease_id, 0)])
    before.restart()
    # What a version of vcpo wrote whose second lease had the numbers 0 to 2.
    (second,) = before.grant("w", num_groups=1, policy_version=0)
    members = tuple(make_trajectory(second.lease_id, number) for number in range(3))
    log.append(TrajectoriesAccepted(lease_id=second.lease_id, trajectories=members[:1]))
    log.append(TrajectoriesAccepted(lease_id=second.lease_id, trajectories=members[1:]))
    await log.committed()
    log.close()
    reopened = open_log()
    after = make_ledger(ManualClock(), incarnation="later", **group_of_4)
    reopened.redo(after.contents, after=0)
    assert reopened.take_events() == []
    (group,) = after.contents.buffer.groups()
    assert {each.trajectory_id for each in group.trajectories} == {
        f"{first.lease_id}/0",
        *(f"{second.lease_id}/{number}" for number in range(3)),
    }
    after.counts().check()


async def test_a_file_that_is_no_log_is_set_aside_and_reported(open_log, tmp_path):
    file_path(tmp_path).write_bytes(b"nothing of the kind" * 1000)
    log = open_log()
    assert [kind for kind, _ in log.take_events()] == ["LogDamaged"]
    accept_groups(log, 1)
    await log.committed()


def test_a_folder_that_cannot_be_written_is_named_with_the_cure(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StartError, match=r"redo-log.sqlite: the redo log cannot be opened"):
        RedoLog(tmp_path / "run", limit_bytes=1)
