import pytest

from vcpo.records.journal import FileTail


@pytest.mark.parametrize(("from_start", "first"), [(True, b"old\n"), (False, b"")])
def test_whole_lines_are_read_once_from_where_the_reader_began(tmp_path, from_start, first):
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    tail = FileTail(path, from_start=from_start)
    assert tail.read() == first
    with path.open("ab") as log:
        log.write(b"new\nha")
    assert tail.read() == b"new\n"
    assert tail.read() == b""
    with path.open("ab") as log:
        log.write(b"lf\n")
    assert tail.read() == b"half\n"


def test_a_file_that_comes_later_is_read_from_its_start(tmp_path):
    tail = FileTail(tmp_path / "log", from_start=False)
    assert tail.read() == b""
    (tmp_path / "log").write_bytes(b"a\n")
    assert tail.read() == b"a\n"
