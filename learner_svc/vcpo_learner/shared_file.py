"""A file of weights in memory without a name, which other processes map too.

```
0        8          64
| newest |   --     | content ...
```

Whoever holds a descriptor of the file can map it, and the kernel frees the memory when the last
descriptor and mapping are gone: nothing is left behind, however its processes end. On Linux it is
a memfd, for which a small /dev/shm is no limit; it counts as memory of the container that filled
it, once. Elsewhere it is a temporary file that is unlinked already.

A set may be patched while another process reads it (`weights.published_set`). The patch sets
`newest_version` before it writes, and a reader reads it after the bytes. Processors that reorder
memory accesses may show a reader a byte of the patch before the version. The checksums refuse such
a set, as any other bytes that are not the manifest's.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Self

_CONTENT = 64
"""Where the content begins: tensors are aligned as the mapping is."""


class SharedFile:
    """One file of this process, or one that another process passed on."""

    def __init__(self, descriptor: int, *, is_writable: bool) -> None:
        """Map the file of a descriptor, which this object owns from then on.

        Raises:
            OSError, ValueError: if it cannot be mapped.
        """
        self.descriptor = descriptor
        """Of the open file, to pass on to another process."""
        self.close_descriptor = weakref.finalize(self, os.close, descriptor)
        """Call it if the file is not passed on; the memory stays mapped."""
        access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        whole = memoryview(mmap.mmap(descriptor, 0, access=access))
        self._versions = whole[:8].cast("Q")
        self.content = whole[_CONTENT:]
        """The bytes of the file."""

    @classmethod
    def of_size(cls, size_bytes: int) -> Self:
        """Return a new file of zeros.

        Raises:
            OSError: if there is not enough memory.
        """
        descriptor = _nameless_file()
        os.truncate(descriptor, _CONTENT + size_bytes)
        return cls(descriptor, is_writable=True)

    @classmethod
    def of(cls, content: bytes | bytearray | memoryview) -> Self:
        """Return a new file with a copy of these bytes."""
        file = cls.of_size(len(content))
        file.content[:] = content
        return file

    @property
    def size_bytes(self) -> int:
        """Size of the content."""
        return len(self.content)

    @property
    def newest_version(self) -> int:
        """Newest version of which the content may hold elements."""
        return self._versions[0]

    @newest_version.setter
    def newest_version(self, policy_version: int) -> None:
        self._versions[0] = policy_version  # eight bytes at once: no reader sees half a number

    def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` from an offset, and the newest version that may be in them."""
        data = bytes(self.content[offset : offset + max_bytes])
        # Read after the bytes: a patch that began before the last of them has set it.
        return data, self.newest_version


def _nameless_file() -> int:
    """Return the descriptor of a new, empty file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vcpo-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
