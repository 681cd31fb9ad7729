"""The file of the redo log: what is in it, what is damaged, and what goes."""

import os
import shutil
import sqlite3

import pytest

from vcpo_learner.redo_log.file import (
    DamagedLogError,
    LogFile,
    Row,
    aside_path,
    file_path,
    replace_damaged,
)


def rows(*positions):
    return [Row(position=one, data=b"change %d" % one) for one in positions]


def large(position):
    return Row(position=position, data=bytes([position]) * 50_000)


def segments(path):
    return sorted(path.with_name("redo-log").iterdir())


@pytest.fixture
def path(tmp_path):
    return file_path(tmp_path)


@pytest.fixture
def file(path):
    file = LogFile(path)
    file.append(rows(1, 2, 3, 4))
    yield file
    file.close()


def change_behind_its_back(path, statement):
    tables = sqlite3.connect(path)
    tables.execute(statement)
    tables.commit()
    tables.close()


def test_changes_are_read_in_their_order_after_a_position(file):
    assert list(file.read(0)) == rows(1, 2, 3, 4)
    assert list(file.read(2)) == rows(3, 4)
    assert list(file.read(9)) == []


def test_changes_outlive_the_process_that_wrote_them(file, path):
    file.close()
    later = LogFile(path)
    assert (list(later.read(0)), later.last_position) == (rows(1, 2, 3, 4), 4)
    later.close()


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("UPDATE change SET data = x'00' WHERE position = 3", "change 3 differs"),
        ("UPDATE change SET checksum = 1 WHERE position = 3", "change 3 differs"),
        ("DELETE FROM change WHERE position = 3", "change 3 is missing"),
        ("UPDATE change SET position = 9 WHERE position = 3", "change 3 is missing"),
    ],
)
def test_reading_ends_at_the_first_change_that_is_damaged(file, path, statement, cause):
    file.close()
    change_behind_its_back(path, statement)
    later, found = LogFile(path), []
    with pytest.raises(DamagedLogError, match=cause) as caught:
        found.extend(later.read(0))
    assert caught.value.last_position == 2
    assert found == rows(1, 2)
    later.close()


def test_two_changes_that_were_swapped_are_damaged(file, path):
    file.close()
    change_behind_its_back(
        path,
        "UPDATE change SET data = (SELECT data FROM change AS other WHERE other.position ="
        " 5 - change.position), checksum = (SELECT checksum FROM change AS other WHERE"
        " other.position = 5 - change.position) WHERE position IN (2, 3)",
    )
    later = LogFile(path)
    with pytest.raises(DamagedLogError, match="change 2 differs"):
        list(later.read(0))
    later.close()


def test_a_file_that_is_no_database_is_damaged(path):
    path.write_bytes(b"nothing of the kind" * 1000)
    with pytest.raises(DamagedLogError, match="not a database"):
        LogFile(path)


def test_a_damaged_file_is_replaced_by_what_can_be_read_of_it(file, path, tmp_path):
    aside = replace_damaged(path, file, after=1, last=3)
    assert (aside, aside.exists()) == (aside_path(path), True)
    later = LogFile(path)
    assert list(later.read(1)) == rows(2, 3)
    later.close()


def test_a_replacement_keeps_what_an_older_checkpoint_needs(file, path):
    file.add_checkpoint(10, 1, kept_steps={10})
    file.add_checkpoint(20, 3, kept_steps={10, 20})
    replace_damaged(path, file, after=3, last=3)
    later = LogFile(path)
    assert list(later.read(1)) == rows(2, 3)
    assert later.checkpoints == ((10, 1), (20, 3))
    assert later.add_checkpoint(30, 3, kept_steps={10, 30}) == 1
    later.close()


def test_a_replacement_leaves_out_an_older_part_that_is_damaged_too(file, path):
    file.add_checkpoint(10, 0, kept_steps={10})
    file.add_checkpoint(20, 2, kept_steps={10, 20})
    file.close()
    change_behind_its_back(path, "UPDATE change SET data = x'00' WHERE position = 1")
    replace_damaged(path, LogFile(path), after=2, last=4)
    later = LogFile(path)
    assert list(later.read(2)) == rows(3, 4)
    assert later.checkpoints == ((20, 2),)
    later.close()


def test_a_replacement_that_was_killed_between_its_renames_is_finished(file, path, tmp_path):
    file.close()
    path.rename(path.with_name(f"{path.name}.partial"))
    assert file_path(tmp_path).exists()


def test_only_what_a_kept_checkpoint_needs_stays(file):
    assert file.add_checkpoint(10, 1, kept_steps={10}) == 1
    assert file.add_checkpoint(20, 3, kept_steps={10, 20}) == 1
    assert file.add_checkpoint(30, 4, kept_steps={10, 30}) == 1
    assert file.size_bytes == 3 * len(b"change 1")
    assert file.add_checkpoint(40, 4, kept_steps={30, 40}) == 4
    assert file.remove_some(3)
    assert not file.remove_some(3)
    assert list(file.read(3)) == rows(4)


def test_a_checkpoint_that_failed_can_be_tried_again(file):
    with pytest.raises(sqlite3.Error):
        file.add_checkpoint(10, None, kept_steps={10})
    assert file.add_checkpoint(10, 3, kept_steps={10}) == 3


def test_space_of_removed_changes_is_used_again(file, path, monkeypatch):
    data = b"x" * 100_000
    monkeypatch.setattr("vcpo_learner.redo_log.segments._SEGMENT_BYTES", 3 * len(data))
    for number in range(5, 60):
        file.append([Row(position=number, data=data)])
        file.sync()
        file.add_checkpoint(number, number, kept_steps={number})
        while file.remove_some(number):
            pass
    file.close()
    assert path.stat().st_size < 2 * len(data)
    assert sum(each.stat().st_size for each in segments(path)) < 10 * len(data)


def test_large_and_small_changes_are_read_in_one_order(file, path):
    file.append([large(5), *rows(6), large(7)])
    file.append([large(8)])
    file.close()
    later = LogFile(path)
    assert list(later.read(3)) == [*rows(4), large(5), *rows(6), large(7), large(8)]
    assert later.size_bytes == 4 * len(b"change 1") + len(b"change 6") + 3 * 50_000
    later.close()
    assert path.stat().st_size < 50_000


def test_each_process_writes_a_segment_of_its_own(file, path):
    file.append([large(5)])
    file.close()
    later = LogFile(path)
    later.append([large(6)])
    assert [each.name for each in segments(path)] == ["000001", "000002"]
    assert list(later.read(4)) == [large(5), large(6)]
    later.close()


def flip(segment):
    data = bytearray(segment.read_bytes())
    data[60_000] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda segment: segment.write_bytes(segment.read_bytes()[:60_000]),
        lambda segment: segment.write_bytes(segment.read_bytes()[:50_000]),
    ],
)
def test_reading_ends_at_the_first_large_change_whose_segment_is_damaged(file, path, damage):
    file.append([large(5), large(6), large(7)])
    damage(*segments(path))
    found = []
    with pytest.raises(DamagedLogError, match="change 6 differs") as caught:
        found.extend(file.read(4))
    assert (found, caught.value.last_position) == ([large(5)], 5)


def test_reading_ends_at_a_change_whose_segment_is_gone(file, path):
    file.append([large(5)])
    segments(path)[0].unlink()
    with pytest.raises(DamagedLogError, match="No such file") as caught:
        list(file.read(0))
    assert caught.value.last_position == 4


def test_a_commit_that_fails_leaves_its_room_in_the_segment_to_the_next_one(file, path):
    file.append([large(5)])
    with pytest.raises(sqlite3.IntegrityError):
        file.append([large(6), large(5)])
    file.append([large(6)])
    assert list(file.read(4)) == [large(5), large(6)]
    assert segments(path)[0].stat().st_size == 3 * 50_000
    file.append([large(7)])
    assert list(file.read(5)) == [large(6), large(7)]
    assert segments(path)[0].stat().st_size == 3 * 50_000


def test_a_kill_between_any_two_writes_leaves_all_that_was_committed(file, path, monkeypatch):
    write, killed = os.pwrite, []

    def kill(committed):
        copy = path.parent / f"killed-{len(killed)}"
        shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("killed-*"))
        killed.append((copy, committed))

    def write_in_parts(descriptor, data, offset):
        kill(file.last_position)
        part = write(descriptor, data[: len(data) // 2 + 1], offset)
        kill(file.last_position)
        return part

    monkeypatch.setattr(os, "pwrite", write_in_parts)
    changes = [*rows(1, 2, 3, 4), large(5), large(6), *rows(7), large(8), large(9)]
    for some in (slice(4, 5), slice(5, 8), slice(8, 9)):
        file.append(changes[some])
        kill(file.last_position)
    monkeypatch.setattr(os, "pwrite", write)
    # Each commit comes between its data and its mark.
    assert [committed for _, committed in killed[-5:]] == [8, 8, 9, 9, 9]
    for copy, committed in killed:
        later = LogFile(file_path(copy))
        assert (later.marked_position or 0) <= committed
        later.append([large(committed + 1)])
        assert list(later.read(0)) == [*changes[:committed], large(committed + 1)]
        later.close()


def test_a_full_segment_ends_with_the_next_sync(file, path, monkeypatch):
    monkeypatch.setattr("vcpo_learner.redo_log.segments._SEGMENT_BYTES", 100_000)
    for position in (5, 6, 7):
        file.append([large(position)])
    assert len(segments(path)) == 1
    file.sync()
    file.append([large(8)])
    assert [each.stat().st_size for each in segments(path)] == [150_000, 50_000]
    assert list(file.read(4)) == [large(each) for each in (5, 6, 7, 8)]


def test_a_sync_that_fails_on_a_full_segment_repeats_no_change(file, path, monkeypatch):
    monkeypatch.setattr("vcpo_learner.redo_log.segments._SEGMENT_BYTES", 1)
    file.append([large(5)])

    def fails(descriptor):
        raise OSError("the disk is away")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="is away"):
            file.sync()
    file.append([large(6)])
    file.sync()
    assert list(file.read(4)) == [large(5), large(6)]


def test_a_segment_that_was_removed_while_it_is_written_is_noticed(file, path):
    file.append([large(5)])
    file.sync()
    segments(path)[0].unlink()
    with pytest.raises(FileNotFoundError, match="000001: was removed"):
        file.sync()


def test_a_replacement_keeps_large_changes(file, path):
    file.append([large(5), large(6)])
    replace_damaged(path, file, after=3, last=5)
    later = LogFile(path)
    assert list(later.read(3)) == [*rows(4), large(5)]
    later.close()


@pytest.mark.parametrize("number", [2, 4])
def test_a_file_of_another_format_is_refused(path, number):
    LogFile(path).close()
    change_behind_its_back(path, f"PRAGMA user_version = {number}")
    with pytest.raises(DamagedLogError, match=f"has format {number}, this version of vcpo reads 3"):
        LogFile(path)
