"""A full set of weights in shared memory, which is patched in place from version to version.

Readers are not kept out while it is patched. What they get is then a mixture: each byte is that of
the version that they asked for, or of a later one. The deltas between these two versions name every
element in which they differ, and say its later bits. So a reader that applies the deltas to the
mixture has the later version, bit for bit. `SharedFile.read` says up to which version it has to go.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vcpo.wire.deltas import element_width
from vcpo.wire.weights import tensor_sections
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.shared_file import SharedFile


class PublishedSet:
    """One safetensors file. The publication's thread patches it; any thread may read it."""

    def __init__(self, policy_version: int, file: SharedFile) -> None:
        """Own a file that holds a version; only this object changes it."""
        self.file = file
        file.newest_version = policy_version

    @property
    def buffer(self) -> memoryview:
        """The bytes of the set."""
        return self.file.content

    def patch(self, policy_version: int, changes: Mapping[str, ChangedElements]) -> None:
        """Write the elements, by tensor, in which the next version differs."""
        self.file.newest_version = policy_version
        sections = tensor_sections(self.buffer)
        for name, change in changes.items():
            section = sections[name]
            num_bytes = section.end - section.begin
            width = element_width(num_bytes, section.num_elements)
            elements = np.frombuffer(
                self.buffer, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
            )
            elements[change.positions] = change.bits
