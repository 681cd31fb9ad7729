"""The ledger at one moment, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.groups import Group, group_to_message

_PART_BYTES: Final = 256 << 20
"""Far below 2 GiB, the most that one protobuf message may have; a part may exceed it by a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The ledger at one moment.

    It does not change while the ledger goes on, so another thread may write it. To make it costs
    the event loop no copy of a token.
    """

    head: ledger_pb2.LedgerSnapshot
    """Everything but the buffered groups."""
    groups: tuple[Group, ...]
    """Buffered, in the order of their grants."""

    def parts(self, part_bytes: int = _PART_BYTES) -> Iterator[ledger_pb2.LedgerSnapshot]:
        """Yield messages for as many files: the head, with the first groups, and then more groups.

        part_bytes: size at which a message is yielded.
        """
        part, size_bytes = ledger_pb2.LedgerSnapshot(), self.head.ByteSize()
        part.CopyFrom(self.head)
        for group in self.groups:
            if size_bytes >= part_bytes:
                yield part
                part, size_bytes = ledger_pb2.LedgerSnapshot(), 0
            message = group_to_message(group)
            part.buffered.append(message)
            size_bytes += message.ByteSize()
        yield part
