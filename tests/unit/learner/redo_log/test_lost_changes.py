"""What a start says of a log that is shorter than what was committed to it."""

import asyncio
import os
import random
import re
import shutil
from contextlib import closing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import ManualClock, make_ledger, make_trajectories
from vcpo_learner.redo_log.end_mark import EndMark
from vcpo_learner.redo_log.file import LogFile, Row, file_path
from vcpo_learner.redo_log.log import RedoLog

LIMIT_BYTES = 1 << 30
GROUPS = 40
COMMITTED = 2 * GROUPS
"""Changes of `fill`: a grant and a submission for each group."""


async def fill(folder):
    """Commit changes as a learner does, in commits of one and of several, and die without a word.

    A learner that dies closes nothing: SQLite's write-ahead log stays.
    """
    log = RedoLog(folder, limit_bytes=LIMIT_BYTES)
    ledger = make_ledger(ManualClock(), log=log)
    for _ in range(GROUPS // 4):
        for lease in ledger.grant("w", num_groups=4, policy_version=0):
            ledger.submit(lease.lease_id, make_trajectories(lease))
        await log.wait_until_kept()
    shutil.copytree(folder, killed := folder.with_name("killed"))
    log.close()
    return killed


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The files of a log whose process was killed after `COMMITTED` changes.

    The grants are in the table, and the submissions in a segment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vcpo_learner.redo_log.file._LARGE_BYTES", 60)
        return asyncio.run(fill(tmp_path_factory.mktemp("runs") / "run"))


def start(folder, *, after=0, recorded_step=0):
    """Redo a log; return the position that was reached, the log's own number of losses, events."""
    with closing(RedoLog(folder, limit_bytes=LIMIT_BYTES)) as log:
        ledger = make_ledger(ManualClock(), incarnation="later")
        log.redo(ledger, after=after, recorded_step=recorded_step)
        ledger.counts().check()
        log.set_spec({"model": "a name"})
        return log.position, log.lost_changes, log.take_events()


def number_lost(events):
    """Return the number of lost changes that the events tell; 0 without such an event."""
    told = [message for kind, message in events if kind == "LogDamaged"]
    if not told:
        return 0
    (message,) = told
    (number,) = re.findall(r"(\d+) later ones, which were committed, are lost", message)
    return int(number)


def copy_of(killed):
    shutil.rmtree(killed.parent / "copy", ignore_errors=True)
    return shutil.copytree(killed, killed.parent / "copy")


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def wal(folder):
    return folder / "redo-log.sqlite-wal"


def mark(folder):
    return folder / "redo-log.mark"


def test_a_log_that_is_whole_is_not_called_damaged(killed):
    assert start(copy_of(killed)) == (COMMITTED, 0, [])


@settings(max_examples=150, deadline=None)
@given(bit=st.integers(0, 1 << 30))
def test_any_bit_of_the_write_ahead_log_that_flips_loses_nothing_or_is_told_in_numbers(killed, bit):
    folder = copy_of(killed)
    flip(wal(folder), bit)
    reached, lost, events = start(folder)
    assert reached + number_lost(events) == COMMITTED
    assert lost == number_lost(events)


@settings(max_examples=100, deadline=None)
@given(bit=st.integers(0, 1 << 30), name=st.sampled_from(["redo-log.sqlite", "redo-log/000001"]))
@example(bit=31087, name="redo-log.sqlite")  # leaves a checkpoint without a number
def test_any_bit_of_the_other_files_that_flips_loses_nothing_or_is_told_in_numbers(
    checkpointed, bit, name
):
    folder = copy_of(checkpointed)
    flip(folder / name, bit)
    reached, lost, events = start(folder)
    assert reached + number_lost(events) == COMMITTED
    assert lost == number_lost(events)
    # The log that goes on is whole.
    assert start(folder)[0] == reached


@pytest.fixture(scope="module")
def checkpointed(killed, tmp_path_factory):
    """The same log without a write-ahead log: SQLite has copied it into the table."""
    folder = shutil.copytree(killed, tmp_path_factory.mktemp("runs") / "run")
    with closing(LogFile(file_path(folder))) as file:
        file.set_spec('{"model": "a name"}')
        file.add_checkpoint(3, 20, kept_steps={3})
    return folder


def test_a_write_ahead_log_that_was_removed_is_told_in_numbers(killed):
    folder = copy_of(killed)
    wal(folder).unlink()
    reached, _, events = start(folder)
    assert reached < COMMITTED
    assert number_lost(events) == COMMITTED - reached
    ((_, message),) = events
    assert f"it ends at change {reached}, and change {COMMITTED} was committed" in message


def remove_log(folder):
    for path in folder.glob("redo-log.sqlite*"):
        path.unlink()
    shutil.rmtree(folder / "redo-log", ignore_errors=True)


def test_a_log_that_was_removed_is_told_in_numbers(killed):
    folder = copy_of(killed)
    remove_log(folder)
    reached, _, events = start(folder, after=30)
    assert (reached, number_lost(events)) == (30, COMMITTED - 30)


def test_a_log_that_was_removed_with_its_mark_is_told_by_checkpoint_and_journal(killed):
    folder = copy_of(killed)
    remove_log(folder)
    mark(folder).unlink()
    reached, lost, ((kind, message),) = start(folder, after=30, recorded_step=21)
    assert (reached, lost, kind) == (30, 21, "LogDamaged")
    assert "it ends at change 0, and the checkpoint holds change 30" in message
    assert "at least 21 later ones" in message
    assert "metrics.jsonl has step 21 and the run goes on from step 0: 21 steps" in message


def test_a_log_that_was_removed_before_the_first_checkpoint_is_told_by_the_journal(tmp_path):
    _, lost, ((kind, message),) = start(tmp_path, recorded_step=3)
    assert (lost, kind) == (3, "LogDamaged")
    assert "it ends at change 0, before step 3 of metrics.jsonl" in message


def test_a_journal_that_is_ahead_of_a_whole_log_is_no_damage(killed):
    # Steps that were undone because of a quarantine stay in the journal until they are retaken.
    assert start(copy_of(killed), recorded_step=9) == (COMMITTED, 0, [])


def test_a_loss_is_told_once(killed):
    folder = copy_of(killed)
    wal(folder).unlink()
    with closing(RedoLog(folder, limit_bytes=LIMIT_BYTES)) as log:
        ledger = make_ledger(ManualClock(), incarnation="later", log=log)
        log.redo(ledger, after=0)
        asyncio.run(restarted(ledger, log))
        reached = log.position
    assert start(folder) == (reached, 0, [])


async def restarted(ledger, log):
    ledger.restart()
    await log.wait_until_kept()


@pytest.mark.parametrize("damage", [os.unlink, lambda path: path.write_bytes(b"\1" * 32)])
def test_a_mark_that_is_lost_costs_no_change_and_is_told(killed, damage):
    folder = copy_of(killed)
    damage(mark(folder))
    reached, lost, ((kind, message),) = start(folder)
    assert (reached, lost, kind) == (COMMITTED, 0, "LogMarkLost")
    assert f"nothing says whether change {COMMITTED} is its last" in message


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 255), others=st.sets(st.integers(0, 255)))
def test_no_damage_of_the_mark_makes_a_whole_log_look_damaged(killed, bit, others):
    folder = copy_of(killed)
    for each in {bit, *others}:
        flip(mark(folder), each)
    reached, lost, events = start(folder)
    assert (reached, lost) == (COMMITTED, 0)
    assert [kind for kind, _ in events] in ([], ["LogMarkLost"])


def rows(*positions):
    return [Row(position=one, data=b"change %d" % one) for one in positions]


def test_a_kill_between_a_commit_and_its_mark_is_no_damage(tmp_path):
    file = LogFile(file_path(tmp_path))
    file.append(rows(1, 2))
    file.append(rows(3))
    file.copy(rows(4, 5))  # the mark does not follow
    file.close()
    later = LogFile(file_path(tmp_path))
    assert (later.marked_position, later.last_position) == (3, 5)
    later.close()


@pytest.mark.parametrize("size", range(16))
def test_a_torn_mark_leaves_the_one_before(tmp_path, monkeypatch, size):
    mark = EndMark(tmp_path)
    mark.begin(4)
    for position in (5, 6, 7):
        mark.move(position)
    write = os.pwrite
    with monkeypatch.context() as torn:
        torn.setattr(os, "pwrite", lambda file, data, at: write(file, data[:size], at))
        mark.move(1000)
        mark.move(2000)
    assert EndMark(tmp_path).position == 7
    mark.move(3000)
    assert EndMark(tmp_path).position == 3000
    mark.close()


def test_a_mark_goes_back_with_a_log_that_lost_its_end(tmp_path):
    first = EndMark(tmp_path)
    first.begin(0)
    for position in range(1, 100):
        first.move(position)
    first.close()
    later = EndMark(tmp_path)
    later.begin(20)
    assert EndMark(tmp_path).position == 20
    later.move(21)
    later.close()
    assert EndMark(tmp_path).position == 21


def test_a_disk_that_refuses_the_mark_refuses_no_change(tmp_path, monkeypatch):
    file = LogFile(file_path(tmp_path))

    def fails(descriptor, data, offset):
        raise OSError("the disk is away")

    with monkeypatch.context() as failing:
        failing.setattr(os, "pwrite", fails)
        file.append(rows(1))
        file.append(rows(2))
    file.append(rows(3))
    file.close()
    assert EndMark(tmp_path).position == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_commit_of_several_changes_that_is_damaged_is_lost_whole(tmp_path, seed):
    draw = random.Random(seed)
    file, ends = LogFile(file_path(tmp_path)), [0]
    while ends[-1] < 60:
        first = ends[-1] + 1
        file.append(rows(*range(first, first + draw.randint(1, 9))))
        ends.append(file.last_position)
    shutil.copytree(tmp_path, folder := tmp_path.with_name(f"{tmp_path.name}-killed"))
    file.close()
    flip(wal(folder), draw.randrange(1 << 30))
    later = LogFile(file_path(folder))
    found = list(later.read(0))
    assert found == rows(*range(1, len(found) + 1))
    assert len(found) in ends
    assert later.marked_position == ends[-1]
    later.close()
