"""The redo log beside an event loop: commits, a full disk, a limit, and what is left of damage."""

import asyncio
import shutil
import sqlite3
import threading
import time
from contextlib import closing, contextmanager

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_ledger,
    make_trajectories,
)
from vcpo.service.lifecycle import StartError
from vcpo.wire.v1.ledger_pb2 import LearnerRestarted, VersionPublished
from vcpo.wire.v1.work_pb2 import LeaseRequest
from vcpo_learner.ledger.changes import LogRoom
from vcpo_learner.redo_log.file import aside_path, file_path
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.redo_log.log_end import change_to_bytes


@pytest.fixture
def open_log(tmp_path):
    logs = []

    def open_log(*, limit_bytes=1 << 30, **options):
        log = RedoLog(tmp_path, limit_bytes=limit_bytes, **{"retry_s": 0.01, **options})
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


def redone_beside(log):
    """The ledger in a copy of the files, as another process finds them after a kill."""
    folder = log.path.parent
    copy = shutil.copytree(folder, folder.with_name("copy"))
    with closing(RedoLog(copy, limit_bytes=1 << 30)) as later:
        return redone(later)


def redone(log):
    ledger = make_ledger(ManualClock(), incarnation="later")
    log.redo(ledger, after=0)
    return ledger


async def test_what_was_committed_is_redone_by_the_next_process(open_log):
    log = open_log()
    before = accept_groups(log, 3)
    await log.wait_until_kept()
    log.close()
    after = redone(open_log())
    assert after.counts() == before.counts()
    assert after.snapshot().groups == before.snapshot().groups


async def test_what_calibrated_a_step_is_redone_with_its_workers(open_log):
    log = open_log()
    ledger = make_ledger(ManualClock(), log=log)
    for worker in ("a", "b", "c"):
        (lease,) = ledger.grant(worker, num_groups=1, policy_version=0)
        ledger.submit(lease.lease_id, make_trajectories(lease))
    batch = ledger.take_batch(policy_version=0, max_policy_lag_steps=1)
    fresh = ledger.newest_trajectories(0, num_tokens=1)
    ledger.record_step(batch, policy_version=0, fresh=fresh)
    await log.wait_until_kept()
    log.close()
    later = open_log()
    redo = later.redo(make_ledger(ManualClock(), incarnation="later"), after=0)
    step = later.read_step(redo.steps[0])
    assert [each.trajectories for each in step.groups] == [each.trajectories for each in batch]
    assert list(step.fresh) == fresh
    assert [each.worker_id for each in redo.steps[0].fresh] == ["c"]


@pytest.fixture
def quick_log(open_log, monkeypatch):
    """A log on a disk that takes no time, whose thread does not sync before it is closed."""
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 3600.0)
    return open_log(clock=ManualClock())


@contextmanager
def thread_in_sync(log, monkeypatch):
    """The thread syncs, and has the file, while the block runs."""
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 0.0)
    is_there, may_go = threading.Event(), threading.Event()
    sync = log._file.sync

    def slow_sync():
        is_there.set()
        may_go.wait()
        sync()

    monkeypatch.setattr(log._file, "sync", slow_sync)
    log.append(VersionPublished(policy_version=0, checksum=0))
    is_there.wait()
    yield
    may_go.set()


def watch_appends(log, monkeypatch):
    """Return a list to which each write adds the name of its thread and its positions."""
    append, writes = log._file.append, []

    def watched(rows):
        append(rows)
        writes.append((threading.current_thread().name, [row.position for row in rows]))

    monkeypatch.setattr(log._file, "append", watched)
    return writes


async def test_a_change_outlives_the_process_as_soon_as_it_is_appended(quick_log):
    before = accept_groups(quick_log, 3)
    assert redone_beside(quick_log).counts() == before.counts()


async def test_the_thread_writes_in_one_commit_all_that_arrived_while_it_had_the_file(
    open_log, monkeypatch
):
    log = open_log(clock=ManualClock())
    ledger = make_ledger(ManualClock(), log=log)
    writes = watch_appends(log, monkeypatch)
    with thread_in_sync(log, monkeypatch):
        ledger.grant("w", num_groups=3, policy_version=0)
        waiting = asyncio.create_task(log.wait_until_kept())
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await waiting
    ledger.grant("w", num_groups=1, policy_version=0)
    await log.wait_until_kept()
    assert writes[:2] == [("MainThread", [1]), ("redo-log", [2, 3, 4])]
    assert [position for _, positions in writes for position in positions] == [1, 2, 3, 4, 5]


async def test_what_waits_for_the_thread_is_not_overtaken(open_log, monkeypatch):
    log = open_log(clock=ManualClock())
    ledger = make_ledger(ManualClock(), log=log)
    writes = watch_appends(log, monkeypatch)
    with thread_in_sync(log, monkeypatch):
        ledger.grant("w", num_groups=1, policy_version=0)
    while len(writes) < 2:  # the loop does not hear of the commit: it does not run
        time.sleep(0.001)
    ledger.grant("w", num_groups=1, policy_version=0)
    await log.wait_until_kept()
    assert [positions for _, positions in writes] == [[1], [2], [3]]
    assert writes[2][0] == "redo-log"


async def test_after_a_slow_write_the_thread_writes_for_a_while(open_log, monkeypatch):
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 3600.0)
    clock = ManualClock()
    log = open_log(clock=clock)
    ledger = make_ledger(ManualClock(), log=log)
    writes, seconds = watch_appends(log, monkeypatch), [0.06]
    append = log._file.append

    def slow_once(rows):
        append(rows)
        clock.advance(seconds.pop() if seconds else 0.0)

    monkeypatch.setattr(log._file, "append", slow_once)
    for pause_s in (0.0, 0.5, 0.6, 0.0):
        clock.advance(pause_s)
        ledger.grant("w", num_groups=1, policy_version=0)
        await log.wait_until_kept()
    assert [name for name, _ in writes] == ["MainThread", "redo-log", "MainThread", "MainThread"]


async def test_a_large_change_is_written_by_the_thread(quick_log, monkeypatch):
    monkeypatch.setattr("vcpo_learner.redo_log.writer._AT_ONCE_BYTES", 20)
    writes = watch_appends(quick_log, monkeypatch)
    quick_log.append(VersionPublished(policy_version=0, checksum=0))
    quick_log.append(LearnerRestarted(incarnation="a name of more than twenty letters"))
    await quick_log.wait_until_kept()
    assert writes == [("MainThread", [1]), ("redo-log", [2])]


async def test_each_write_of_the_event_loop_is_synced_soon(open_log, monkeypatch):
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 0.01)
    log = open_log()
    sync, synced = log._file.sync, []

    def watched():
        position = log._file.last_position
        sync()
        synced.append(position)

    monkeypatch.setattr(log._file, "sync", watched)
    for position in (1, 2, 3):
        log.append(VersionPublished(policy_version=position, checksum=0))
        async with asyncio.timeout(10):
            while not synced or synced[-1] < position:
                await asyncio.sleep(0.001)


async def test_a_full_disk_loses_nothing_and_lets_nobody_believe_that_it_was_written(open_log):
    log = open_log()
    with files_of_at_most(1):
        ledger = accept_groups(log, 2)
        waiting = asyncio.create_task(log.wait_until_kept())
        while log.room is not LogRoom.UNWRITABLE:
            await asyncio.sleep(0.001)
        assert not waiting.done()
    await waiting
    assert log.room is LogRoom.FREE
    assert [kind for kind, _ in log.take_events()] == ["DiskFull", "DiskHasRoom"]
    log.close()
    assert redone(open_log()).counts() == ledger.counts()


@pytest.mark.parametrize("name", ["append", "sync", "add_checkpoint", "remove_some"])
async def test_a_write_that_fails_for_a_moment_stops_no_work_for_longer(
    open_log, monkeypatch, name
):
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 0.0)
    log = open_log()
    write, errors = getattr(log._file, name), [OSError("the disk is away")] * 2

    def fails_twice(*arguments, **options):
        if errors:
            raise errors.pop()
        return write(*arguments, **options)

    monkeypatch.setattr(log._file, name, fails_twice)
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
            await log.wait_until_kept()
        with pytest.raises(type(error)):  # who waits for a batch learns of it too
            await dispatcher_fixture(log=log).dispatcher.next_batch()
    assert log.take_events() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_commits_whose_file_was_removed_are_not_believed_to_be_written(
    open_log, monkeypatch, tmp_path
):
    monkeypatch.setattr("vcpo_learner.redo_log.writer._SYNC_S", 0.0)
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
    await log.wait_until_kept()
    assert log.room is LogRoom.FULL
    log.add_checkpoint(1, log.position, kept_steps={1})
    while log.room is LogRoom.FULL:
        await asyncio.sleep(0.001)
    assert [kind for kind, _ in log.take_events()] == ["LogFull", "LogHasRoom"]


async def test_what_arrives_while_a_checkpoint_makes_room_counts(quick_log, monkeypatch):
    add_checkpoint = quick_log._file.add_checkpoint
    is_there = threading.Event()

    def watched(*arguments, **options):
        found = add_checkpoint(*arguments, **options)
        is_there.set()
        return found

    monkeypatch.setattr(quick_log._file, "add_checkpoint", watched)
    accept_groups(quick_log, 2)
    quick_log.add_checkpoint(1, quick_log.position, kept_steps={1})
    is_there.wait()  # the loop, which does not run, has not heard of it
    quick_log.append(LearnerRestarted(incarnation="later"))
    await quick_log.wait_until_kept()
    quick_log.close()
    await asyncio.sleep(0)  # what the thread told
    size_bytes = len(change_to_bytes(LearnerRestarted(incarnation="later")))
    assert quick_log._progress.size_bytes == size_bytes


async def test_a_damaged_log_gives_what_comes_before_the_damage_and_goes_on_from_there(
    open_log, tmp_path
):
    log = open_log()
    accept_groups(log, 2)  # two grants, two submissions
    await log.wait_until_kept()
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
    assert "and 1 later ones, which were committed, are lost" in message
    assert aside_path(file_path(tmp_path)).exists()
    assert (later.position, later.lost_changes) == (3, 1)
    later.append(VersionPublished(policy_version=0, checksum=0))
    await later.wait_until_kept()
    later.close()
    last = open_log()
    assert redone(last).counts() == ledger.counts()
    assert (last.take_events(), last.lost_changes) == ([], 0)


async def test_a_change_that_does_not_fit_the_ledger_ends_the_redo(open_log):
    log = open_log()
    ledger = accept_groups(log, 1)
    ledger.record_step([], policy_version=0, fresh=())
    await log.wait_until_kept()
    log.close()
    tables = open_log()
    other = make_ledger(ManualClock(), incarnation="later")
    tables.redo(other, after=1)  # without the grant, the submission has no lease
    assert tables.position == 1
    ((kind, message),) = tables.take_events()
    assert (kind, "train-now-0 is not open" in message) == ("LogDamaged", True)


async def test_a_change_that_cannot_be_encoded_leaves_no_gap(open_log):
    log = open_log()
    ledger = accept_groups(log, 1)
    with pytest.raises(KeyError):
        log.append(LeaseRequest())
    ledger.grant("w", num_groups=1, policy_version=0)
    await log.wait_until_kept()
    log.close()
    reopened = open_log()
    assert redone(reopened).counts() == ledger.counts()
    assert reopened.take_events() == []


async def test_a_file_that_is_no_log_is_set_aside_and_reported(open_log, tmp_path):
    file_path(tmp_path).write_bytes(b"nothing of the kind" * 1000)
    log = open_log()
    assert [kind for kind, _ in log.take_events()] == ["LogDamaged"]
    accept_groups(log, 1)
    await log.wait_until_kept()


def test_a_folder_that_cannot_be_written_is_named_with_the_cure(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StartError, match=r"redo-log.sqlite: the redo log cannot be opened"):
        RedoLog(tmp_path / "run", limit_bytes=1)
