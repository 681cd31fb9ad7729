"""Checks of message fields that several services share; each names the field it refuses."""

from __future__ import annotations

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_ID_CHARACTERS, MAX_WAIT_S


def check_id(field: str, value: str) -> None:
    """Check an identifier: not empty, not longer than `MAX_ID_CHARACTERS`.

    Raises:
        InvalidMessageError: when it is.
    """
    if not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise InvalidMessageError(field, value, f"1 to {MAX_ID_CHARACTERS} characters")


def check_wait(field: str, wait_s: float) -> float:
    """Check how long a caller wants to wait; returns it.

    Raises:
        InvalidMessageError: when it is negative, too long or not a number.
    """
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise InvalidMessageError(field, wait_s, f"0 to {MAX_WAIT_S:g} seconds")
    return wait_s
