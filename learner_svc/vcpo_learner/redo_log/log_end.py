"""Where the redo log must end and where it ends: what a start finds missing, in numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

from google.protobuf.message import DecodeError

from vcpo.records.journal import METRICS_FILE
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.changes import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """What a start knows of the end of its log. Positions are those of changes, 0 is none."""

    redone: int
    """The last change that was redone; the checkpoint's, if none was."""
    held: int
    """The newest change or checkpoint in the file; 0 if the file cannot be read."""
    checkpoint: int
    """The last change that the checkpoint holds."""
    marked: int | None
    """The newest change of the mark; None if there is no mark that can be read."""
    step: int
    """The last step of the ledger that was redone."""
    recorded_step: int
    """The last step that the journal has. It serves the message, where no mark does the judgement
    too: after a step that was rolled back the journal may be ahead of a whole log."""

    @property
    def num_lost(self) -> int:
        """Changes that were committed and cannot be redone; a lower bound unless `is_exact`."""
        if self.marked is not None:  # it alone has a checksum: a damaged file may name any position
            return max(0, self.marked - self.redone)
        # Each step is a change at least.
        return max(self.held - self.redone, self.num_lost_steps)

    @property
    def is_exact(self) -> bool:
        """Whether the number of lost changes is known."""
        return self.marked is not None

    @property
    def num_lost_steps(self) -> int:
        """Steps of the journal that have to be taken anew."""
        return max(0, self.recorded_step - self.step)

    @property
    def is_short(self) -> bool:
        """Whether something proves that the log does not hold what was committed."""
        return self.num_lost > 0 or self.held < self.checkpoint

    @property
    def is_unknown(self) -> bool:
        """Whether nothing can tell that the log is whole, though something was committed."""
        return self.marked is None and self.held > 0

    def missing(self) -> str:
        """Return how the log is too short, as a clause."""
        if self.marked is not None and self.marked > self.held:
            return f"it ends at change {self.held}, and change {self.marked} was committed"
        if self.held < self.checkpoint:
            return (
                f"it ends at change {self.held}, and the checkpoint holds change {self.checkpoint}"
            )
        return f"it ends at change {self.held}, before step {self.recorded_step} of {METRICS_FILE}"

    def loss(self) -> str:
        """Return what is used and what is lost, as clauses."""
        used = f"the {self.redone - self.checkpoint} changes before it are used"
        number = f"{self.num_lost}" if self.is_exact else f"at least {self.num_lost}"
        lost = f"{used}, and {number} later ones, which were committed, are lost"
        if not self.num_lost_steps:
            return lost
        return (
            f"{lost}; {METRICS_FILE} has step {self.recorded_step} and the run goes on from step"
            f" {self.step}: {self.num_lost_steps} steps are taken anew, with other batches"
        )


_FIELDS: Final = {
    field.message_type: field.number
    for field in ledger_pb2.LedgerChange.DESCRIPTOR.oneofs_by_name["change"].fields
}
"""Number of the field of each kind of change."""
_LENGTH_DELIMITED: Final = 2


class UnreadableChangeError(ValueError):
    """Bytes are no change of the ledger; the message says why."""


def change_to_bytes(change: Change) -> bytes:
    """Return the bytes of a `LedgerChange` that holds a change.

    The field's tag and size are written here: a message that is put into another one is copied.
    """
    data = change.SerializeToString()
    head, size = (
        bytearray([_FIELDS[change.DESCRIPTOR] << 3 | _LENGTH_DELIMITED]),
        len(data),
    )
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return b"".join((head, data))


def change_from_bytes(data: bytes) -> Change:
    """Read what `change_to_bytes` returned.

    Raises:
        UnreadableChangeError: if it is something else.
    """
    try:
        message = ledger_pb2.LedgerChange.FromString(data)
    except DecodeError as error:
        raise UnreadableChangeError(str(error)) from error
    kind = message.WhichOneof("change")
    if kind is None:
        raise UnreadableChangeError("it holds no change that this version of vcpo knows")
    return cast("Change", getattr(message, kind))
