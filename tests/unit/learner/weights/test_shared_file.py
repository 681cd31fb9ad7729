"""A file of weights that processes share."""

import os
from pathlib import Path

import numpy as np
import pytest

from vcpo_learner.shared_file import SharedFile

CONTENT = bytes(range(256)) * 100


def test_bytes_are_read_with_the_newest_version_among_them():
    file = SharedFile.of(CONTENT)
    file.newest_version = 7
    assert file.size_bytes == 25_600
    assert file.read(256, 512) == (CONTENT[256:768], 7)
    assert file.read(25_599, 512) == (b"\xff", 7)
    assert file.read(25_600, 512) == (b"", 7)


@pytest.mark.parametrize("has_memfd", [True, False])
def test_another_mapping_sees_every_change_and_cannot_make_any(monkeypatch, has_memfd):
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    file = SharedFile.of(CONTENT)
    other = SharedFile(os.dup(file.descriptor), is_writable=False)
    file.newest_version = (1 << 40) + 1
    file.content[10] = 99
    assert other.content == file.content
    assert other.read(10, 2) == (bytes([99, 11]), (1 << 40) + 1)
    with pytest.raises(TypeError, match="read-only"):
        other.content[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        other.newest_version = 1


def test_the_memory_is_aligned_for_tensors_and_zero_at_first():
    file = SharedFile.of_size(1000)
    assert bytes(file.content) == bytes(1000)
    assert file.newest_version == 0
    assert np.frombuffer(file.content, dtype=np.uint8).ctypes.data % 64 == 0


def open_files():
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_a_dropped_file_closes_its_descriptor():
    before = open_files()
    file = SharedFile.of(CONTENT)
    assert len(open_files()) > len(before)
    del file
    assert open_files() == before


def test_a_reader_keeps_the_bytes_of_a_file_that_its_owner_dropped():
    file = SharedFile.of(CONTENT)
    view = file.content
    del file
    assert view == CONTENT
