"""Checks of message fields that several services share."""

from __future__ import annotations

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_ID_CHARACTERS, MAX_WAIT_S


def check_id(field: str, value: str) -> None:
    """Check that an identifier has 1 to `MAX_ID_CHARACTERS` characters.

    Raises:
        InvalidMessageError: naming the field, if it has not.
    """
    if not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise InvalidMessageError(field, value, f"1 to {MAX_ID_CHARACTERS} characters")


def check_wait(field: str, wait_s: float) -> float:
    """Check that a caller's wait is 0 to `MAX_WAIT_S` seconds, and return it.

    Raises:
        InvalidMessageError: naming the field, if it is not.
    """
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise InvalidMessageError(field, wait_s, f"0 to {MAX_WAIT_S:g} seconds")
    return wait_s
