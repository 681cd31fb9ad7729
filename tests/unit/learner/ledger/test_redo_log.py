"""The redo log: what a killed process leaves, a full disk, and damage of every kind."""

import asyncio
import os
import shutil

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_ledger,
    make_partial_response,
    make_trajectories,
    make_trajectory,
)
from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import partial_to_message, trajectory_to_message
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.ledger import redo_log
from vcpo_learner.ledger.redo_log import RedoLog, change_from_bytes, change_to_bytes


def quiet(kind, text):
    """Hear of no event."""


EVALUATED = ledger_pb2.Evaluated(step=50, accuracy=0.5)


@pytest.fixture
def open_log(tmp_path):
    logs = []

    def open_log(**options):
        for earlier in logs:
            earlier.close()
        log = RedoLog(tmp_path, lambda *event: log.events.append(event))
        vars(log).update({"events": [], "retry_s": 0.01, **options})
        logs.append(log)
        return log

    yield open_log
    for log in logs:
        log.close()


def accept_groups(log, count, *, incarnation="now"):
    """Make two changes a group."""
    ledger = make_ledger(ManualClock(), incarnation=incarnation, log=log)
    for lease in ledger.grant("w", num_groups=count, policy_version=0):
        ledger.submit(lease.lease_id, make_trajectories(lease))
    return ledger


def redone(log, *, after=0, step=0):
    """The ledger of the changes, and what is said of those that are missing."""
    ledger = make_ledger(ManualClock(), incarnation="later")
    return ledger, *log.redo(ledger.replay, after=after, step=step)


def numbers(log, *, after=0):
    """The steps of evaluations that a log gives back, and what is said of missing ones."""
    found = []
    return found, *log.redo(lambda change: found.append(change.step), after=after, step=0)


def evaluated(*steps):
    return [ledger_pb2.Evaluated(step=step, accuracy=0.5) for step in steps]


async def write(log, *steps, cuts=()):
    for change in evaluated(*steps):
        log.append(change)
        if change.step in cuts:
            log.cut(change.step)
    await log.wait_until_kept()
    log.close()


async def test_what_was_kept_is_redone_by_the_next_process(open_log):
    log = open_log()
    before = accept_groups(log, 3)
    await log.wait_until_kept()
    after, missing, lost = redone(open_log())
    assert after.counts() == before.counts()
    assert after.snapshot().groups == before.snapshot().groups
    assert (missing, lost) == ("", 0)


async def test_changes_go_on_after_a_restart_and_only_those_after_a_checkpoint_are_redone(open_log):
    await write(open_log(), 1, 2, 3, cuts=[2])
    log = open_log()
    assert numbers(log) == ([1, 2, 3], "", 0)
    await write(log, 4)
    log = open_log()
    assert numbers(log, after=2) == ([3, 4], "", 0)
    assert log.position == 4


async def test_files_go_that_no_kept_checkpoint_needs(open_log, tmp_path):
    await write(open_log(), *range(1, 10), cuts=[3, 6, 9])
    log = open_log()
    log.remove_before(6)
    assert sorted(path.name for path in (tmp_path / "redo-log").iterdir()) == [
        "0000000000000007-00000006.log",
        "0000000000000010-00000009.log",
    ]
    log = open_log()
    assert numbers(log, after=6) == ([7, 8, 9], "", 0)
    assert log.first_step == 6


async def test_a_log_that_grew_makes_a_checkpoint_due(open_log):
    log = open_log(checkpoint_bytes=30)
    for step in range(3):
        log.append(EVALUATED)
        assert log.is_checkpoint_due is (step == 2)
    assert log.cut(1) == 3
    assert not log.is_checkpoint_due


async def until_unwritable(log):
    async with asyncio.timeout(10):
        while not log.is_unwritable:
            await asyncio.sleep(0.001)


async def test_a_full_disk_loses_nothing_and_lets_nobody_believe_that_it_was_written(open_log):
    log = open_log()
    with files_of_at_most(1):
        ledger = accept_groups(log, 2)
        waiting = asyncio.create_task(log.wait_until_kept())
        await until_unwritable(log)
        assert not waiting.done()
        assert ledger.grant("w", num_groups=1, policy_version=0) == []
    await waiting
    assert not log.is_unwritable
    assert [kind for kind, _ in log.events] == ["DiskFull", "DiskHasRoom"]
    assert redone(open_log())[0].counts() == ledger.counts()


async def test_a_part_of_a_change_that_a_full_disk_took_is_taken_back(open_log):
    log = open_log()
    with files_of_at_most(100):
        for change in evaluated(*range(1, 9)):
            log.append(change)
        await until_unwritable(log)
    await log.wait_until_kept()
    assert numbers(open_log()) == ([*range(1, 9)], "", 0)


async def test_a_log_on_a_full_disk_can_be_closed(open_log):
    log = open_log(retry_s=60.0)
    with files_of_at_most(1):
        log.append(EVALUATED)
        await until_unwritable(log)
        log.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_folder_that_is_gone_is_not_believed_to_be_written(open_log, tmp_path):
    log = open_log()
    shutil.rmtree(tmp_path / "redo-log")
    log.append(EVALUATED)
    with pytest.raises(FileNotFoundError):
        await log.wait_until_kept()
    with pytest.raises(FileNotFoundError):  # who waits for a batch learns of it too
        await dispatcher_fixture(log=log).dispatcher.next_batch()


async def test_each_write_is_synced_soon(open_log, monkeypatch):
    assert redo_log._SYNC_S <= 1.0, "the log promises that a machine loses a second at most"
    monkeypatch.setattr(redo_log, "_SYNC_S", 0.01)
    sync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file) or sync(file))
    log = open_log()
    for _ in range(3):
        log.append(EVALUATED)
        await log.wait_until_kept()
        synced.clear()
        async with asyncio.timeout(10):
            while not synced:
                await asyncio.sleep(0.001)


async def test_a_sync_that_failed_holds_up_nothing_once_one_succeeds(open_log, monkeypatch):
    monkeypatch.setattr(redo_log, "_SYNC_S", 0.01)
    log, sync, errors = open_log(), os.fsync, [OSError("input/output error")]

    def fail_once(file):
        if errors:
            raise errors.pop()
        sync(file)

    log.append(EVALUATED)
    await log.wait_until_kept()
    monkeypatch.setattr(os, "fsync", fail_once)
    async with asyncio.timeout(10):
        while [kind for kind, _ in log.events] != ["DiskFull", "DiskHasRoom"]:
            await asyncio.sleep(0.001)


async def test_a_change_that_cannot_be_encoded_leaves_no_gap(open_log):
    log = open_log()
    log.append(evaluated(1)[0])
    with pytest.raises(KeyError):
        log.append(work_pb2.LeaseRequest())
    await write(log, 2)
    assert numbers(open_log()) == ([1, 2], "", 0)


async def test_a_change_that_does_not_fit_the_ledger_ends_the_redo(open_log):
    log = open_log()
    accept_groups(log, 1)
    await log.wait_until_kept()
    log = open_log()
    _, missing, lost = redone(log, after=1)  # without the grant, the submission has no lease
    assert "change 2 cannot be redone (train-now-0 is not open)" in missing
    assert (log.position, lost) == (1, 1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a process left: changes 1 to 4, 5 to 8, and 9 to 12 of another process."""
    folder = tmp_path_factory.mktemp("run")

    async def fill():
        await write(RedoLog(folder, quiet), *range(1, 9), cuts=[4])
        log = RedoLog(folder, quiet)
        numbers(log)
        await write(log, *range(9, 13))

    asyncio.run(fill())
    return folder


def copy_of(killed, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copies") / "run"
    shutil.copytree(killed, copy)
    return copy, sorted((copy / "redo-log").glob("*.log"))


def check_told_once(folder, *, is_lost_exact=True):
    """Check what a start finds of twelve changes; return how many."""
    log = RedoLog(folder, quiet)
    found, missing, lost = numbers(log)
    assert found == [*range(1, len(found) + 1)]
    if is_lost_exact:
        assert lost == 12 - len(found)
    else:
        assert 0 <= lost <= 12 - len(found)
    assert bool(missing) or len(found) == 12 or not is_lost_exact

    async def go_on():
        await write(log, 100)

    asyncio.run(go_on())
    later = RedoLog(folder, quiet)
    assert numbers(later) == ([*found, 100], "", 0), "it is told once, and the log goes on"
    return len(found)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bit_that_flips_is_found_and_what_it_costs_is_told(killed, tmp_path_factory, data):
    folder, files = copy_of(killed, tmp_path_factory)
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    # Behind a damaged size in the newest file nothing can be counted.
    check_told_once(folder, is_lost_exact=path != files[-1])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_file_that_was_cut_gives_what_is_left(killed, tmp_path_factory, data):
    folder, files = copy_of(killed, tmp_path_factory)
    path = data.draw(st.sampled_from(files))
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    # The newest file looks as if its process had been killed: what is torn was not answered.
    check_told_once(folder, is_lost_exact=path != files[-1])


@pytest.mark.parametrize(("number", "found"), [(0, 0), (1, 4)])
def test_a_file_that_was_removed_is_told_in_numbers(killed, tmp_path_factory, number, found):
    folder, files = copy_of(killed, tmp_path_factory)
    files[number].unlink()
    assert check_told_once(folder) == found


def test_a_damaged_size_is_told_though_the_checkpoint_has_its_change(killed, tmp_path_factory):
    folder, files = copy_of(killed, tmp_path_factory)
    files[0].write_bytes(bytes(4) + files[0].read_bytes()[4:])
    found, missing, lost = numbers(RedoLog(folder, quiet), after=2)
    assert "change 1 has a damaged size" in missing
    assert (found, lost) == ([], 10)


def test_a_log_that_ends_before_the_checkpoint_is_told(killed, tmp_path_factory):
    folder, files = copy_of(killed, tmp_path_factory)
    for path in files[1:]:
        path.unlink()
    _, missing, lost = numbers(RedoLog(folder, quiet), after=8)
    assert "ends at change 4, and the checkpoint holds change 8" in missing
    assert lost == 0


def test_what_damage_cut_off_stays_until_a_checkpoint(killed, tmp_path_factory):
    folder, files = copy_of(killed, tmp_path_factory)
    files[1].write_bytes(b"nothing of the kind")
    log = RedoLog(folder, quiet)
    numbers(log)
    assert len(list((folder / "redo-log").glob("damaged-*"))) == 2
    log.remove_before(0)
    assert not list((folder / "redo-log").glob("damaged-*"))


def test_a_folder_that_cannot_be_written_is_named_with_the_fix(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StartError, match=r"redo-log: the redo log cannot be opened"):
        RedoLog(tmp_path / "run", quiet)


CHANGES = {
    "lease_granted": ledger_pb2.LeaseGranted(
        lease_id="train-a-7", worker_id="w", prompt_index=3, oldest_step=1, is_requeued=True
    ),
    "submission": work_pb2.SubmitRequest(
        worker_id="w",
        lease_id="train-a-7",
        trajectories=[
            trajectory_to_message(make_trajectory("train-a-7", number, versions=(1, 2)))
            for number in range(400)
        ],
    ),
    "lease_ended": ledger_pb2.LeaseEnded(
        lease_id="train-a-7",
        reason="released",
        partial_responses=[partial_to_message(make_partial_response(1, 2))],
    ),
    "groups_dropped": ledger_pb2.GroupsDropped(lease_ids=["a-7", "a-2"], reason="lag_exceeded"),
    "evaluated": EVALUATED,
    "lag_limit": ledger_pb2.LagLimit(steps=3, warning_level="critical", rollback_step=40),
    "learner_restarted": ledger_pb2.LearnerRestarted(incarnation="b", restarts=2),
}


def test_every_kind_of_change_comes_back_from_its_bytes():
    fields = ledger_pb2.LedgerChange.DESCRIPTOR.oneofs_by_name["change"].fields
    assert CHANGES.keys() == {field.name for field in fields}
    for change in CHANGES.values():
        assert change_from_bytes(change_to_bytes(change)) == change


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x12\x02\x0a"], ids=["empty", "tag", "cut"])
def test_bytes_that_are_no_change_are_refused(data):
    with pytest.raises(DecodeError):
        change_from_bytes(data)
