"""The file of the redo log: what is in it, what is damaged, and what goes."""

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


def test_space_of_removed_changes_is_used_again(file, path):
    data = b"x" * 100_000
    for number in range(5, 60):
        file.append([Row(position=number, data=data)])
        file.add_checkpoint(number, number, kept_steps={number})
        while file.remove_some(number):
            pass
    file.close()
    assert path.stat().st_size < 10 * len(data)
