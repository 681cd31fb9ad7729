"""Numbers of tokens as bytes: four for each, little-endian.

One length and one copy where a repeated field has a number to decode, to box and to check each: a
submission of thousands of tokens is read several times as fast (`benchmarks.ingest`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from vcpo.wire.errors import InvalidMessageError

_SIZE_BYTES = 4
_HIGHEST_LOGPROB = 1e-3
"""A token that was sampled had positive probability; rounding may lift it just above 1."""


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Write token ids, each from 0 to 2^32 - 1."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Write log-probabilities, rounded to float32."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_token_ids(field: str, data: bytes, *, most: int) -> tuple[int, ...]:
    """Read 1 to `most` token ids.

    Raises:
        InvalidMessageError: when they are fewer or more, or the bytes are not whole numbers.
    """
    if not 1 <= (count := _count(field, data)) <= most:
        raise InvalidMessageError(field, f"{count} tokens", f"1 to {most} tokens")
    return struct.unpack(f"<{count}I", data)


def unpack_logprobs(field: str, data: bytes, *, count: int) -> tuple[float, ...]:
    """Read `count` natural log-probabilities of sampled tokens.

    Raises:
        InvalidMessageError: when they are fewer or more, or one is not finite or above 0.
    """
    if (received := _count(field, data)) != count:
        raise InvalidMessageError(field, f"{received} values", f"as many as tokens ({count})")
    logprobs: tuple[float, ...] = struct.unpack(f"<{count}f", data)
    # The sum of float32 numbers is finite as a double if and only if all of them are.
    if not math.isfinite(sum(logprobs)) or max(logprobs) > _HIGHEST_LOGPROB:
        _refuse_first(field, logprobs)
    return logprobs


def _refuse_first(field: str, logprobs: Sequence[float]) -> None:
    for index, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= _HIGHEST_LOGPROB):
            raise InvalidMessageError(f"{field}[{index}]", logprob, "finite and at most 0")


def _count(field: str, data: bytes) -> int:
    """How many numbers the bytes are; known before any is read."""
    if len(data) % _SIZE_BYTES:
        requirement = f"a multiple of {_SIZE_BYTES} bytes"
        raise InvalidMessageError(field, f"{len(data)} bytes", requirement)
    return len(data) // _SIZE_BYTES
