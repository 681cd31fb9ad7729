"""A full set of weights in memory, which is patched in place from version to version.

Readers are not kept out while it is patched. What they get is then a mixture: each byte is that of
the version that they asked for, or of a later one. The deltas between these two versions name every
element in which they differ, and say its later bits. So a reader that applies the deltas to the
mixture has the later version, bit for bit. `read` says up to which version it has to go.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vcpo.wire.deltas import element_width
from vcpo.wire.weights import tensor_sections
from vcpo_learner.changed_elements import ChangedElements


class PublishedSet:
    """One safetensors file. The publication's thread patches it; any thread may read it."""

    def __init__(self, policy_version: int, buffer: bytearray) -> None:
        """Own a buffer that holds a version; only this object changes it."""
        self.buffer = buffer
        self.newest_version = policy_version
        """Newest version of which the set may hold elements."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return len(self.buffer)

    def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` from an offset, and the newest version that may be in them."""
        data = bytes(memoryview(self.buffer)[offset : offset + max_bytes])
        # Read after the bytes: a patch that began before the last of them has set it.
        return data, self.newest_version

    def patch(self, policy_version: int, changes: Mapping[str, ChangedElements]) -> None:
        """Write the elements, by tensor, in which the next version differs."""
        self.newest_version = policy_version
        sections = tensor_sections(self.buffer)
        for name, change in changes.items():
            section = sections[name]
            num_bytes = section.end - section.begin
            width = element_width(num_bytes, section.num_elements)
            elements = np.frombuffer(
                self.buffer, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
            )
            elements[change.positions] = change.bits
