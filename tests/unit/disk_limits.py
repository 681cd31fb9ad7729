"""A disk without room: the kernel's own limit on the size of this process's files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def limit_file_size(size_bytes: int) -> int:
    """Let no file grow beyond a size; the kernel refuses with EFBIG. Returns the limit before."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, most))
    return before


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The same while the block runs."""
    before = limit_file_size(size_bytes)
    try:
        yield
    finally:
        limit_file_size(before)
