"""Changes of the ledger as bytes, and back: one `LedgerChange` message each."""

from __future__ import annotations

from typing import Final, cast

from google.protobuf.message import DecodeError

from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.changes import Change

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
