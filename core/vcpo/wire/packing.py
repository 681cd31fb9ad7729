"""Token ids and log-probabilities as bytes: four bytes per number, little-endian.

A number takes four bytes and no Python object, both on the wire and in memory. A bytes field is
read with one copy, while a repeated field decodes, boxes and checks every number. A submission of
thousands of tokens is therefore read several times as fast (`benchmarks.learner.ingest`).
"""

from __future__ import annotations

import math
import operator
import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar, overload

from vcpo.wire.errors import InvalidMessageError

_SIZE_BYTES = 4
HIGHEST_LOGPROB = 1e-3
"""Largest accepted log-probability; rounding may lift that of a certain token just above 0."""
LOWEST_LOGPROB = -100.0
"""Smallest accepted log-probability of a sampled token. An engine draws with noise of float32. It
reaches no token below about -40, and a probability below e^-104 is 0."""

_Number = TypeVar("_Number", int, float)


class PackedNumbers(Sequence[_Number]):
    """An immutable sequence of four-byte numbers; it equals any sequence of equal numbers."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data
        """The bytes of the wire field."""

    def __len__(self) -> int:
        return len(self.data) // _SIZE_BYTES

    def __iter__(self) -> Iterator[_Number]:
        return iter(self._view)

    @overload
    def __getitem__(self, index: int) -> _Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> _Number | Self:
        if isinstance(index, slice):
            return type(self)(self._view[index].tobytes())
        return self._view[index]

    def tolist(self) -> list[_Number]:
        numbers: list[Any] = self._view.tolist()
        return numbers

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self._view == other._view
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.data,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    @property
    @abstractmethod
    def _view(self) -> memoryview[_Number]:
        """The numbers in the machine's byte order, which is little-endian wherever torch runs."""


class PackedTokenIds(PackedNumbers[int]):
    """Token ids, each from 0 to 2^32 - 1."""

    __slots__ = ()

    @property
    def _view(self) -> memoryview[int]:
        return memoryview(self.data).cast("I")


class PackedLogprobs(PackedNumbers[float]):
    """Log-probabilities in nats, float32."""

    __slots__ = ()

    @property
    def _view(self) -> memoryview[float]:
        return memoryview(self.data).cast("f")


class RouterLayout(NamedTuple):
    """What the routes of a model's tokens look like."""

    num_layers: int
    """Decoder layers, with and without experts."""
    num_choices: int
    """Experts of a token in one layer."""
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoutes:
    """The experts that computed the first tokens of a prompt and its response."""

    experts: bytes
    """[num_tokens, num_layers, num_choices] uint8, or uint16 little-endian if `is_wide`; 0 in
    layers without experts."""
    num_layers: int
    num_choices: int
    is_wide: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.experts) // (self.num_layers * self.num_choices * (1 + self.is_wide))

    def first_beyond(self, num_experts: int) -> int | None:
        """Return a number that is no expert's; None if there is none."""
        numbers = memoryview(self.experts).cast("H") if self.is_wide else self.experts
        if not self.is_wide and not self.experts.translate(
            None, bytes(range(min(num_experts, 256)))
        ):
            return None
        return next((each for each in numbers if each >= num_experts), None)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return the bytes of token ids, each from 0 to 2^32 - 1."""
    if isinstance(token_ids, PackedTokenIds):
        return token_ids.data
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Return the bytes of log-probabilities, rounded to float32."""
    if isinstance(logprobs, PackedLogprobs):
        return logprobs.data
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_token_ids(field: str, data: bytes, *, most: int) -> PackedTokenIds:
    """Read 1 to `most` token ids."""
    if not 1 <= (count := _count(field, data)) <= most:
        raise InvalidMessageError(field, f"{count} tokens", f"1 to {most} tokens")
    return PackedTokenIds(data)


def unpack_logprobs(field: str, data: bytes, *, count: int) -> PackedLogprobs:
    """Read `count` natural log-probabilities of sampled tokens."""
    if (received := _count(field, data)) != count:
        raise InvalidMessageError(field, f"{received} values", f"one per token ({count})")
    logprobs = PackedLogprobs(data)
    numbers = logprobs.tolist()
    # A NaN makes the sum one, wherever it stands; min and max may pass over it.
    if numbers and not (
        LOWEST_LOGPROB <= min(numbers) <= max(numbers) <= HIGHEST_LOGPROB
        and math.isfinite(sum(numbers))
    ):
        index, wrong = next(
            (index, each)
            for index, each in enumerate(numbers)
            if not LOWEST_LOGPROB <= each <= HIGHEST_LOGPROB
        )
        raise InvalidMessageError(f"{field}[{index}]", wrong, f"from {LOWEST_LOGPROB:g} to 0 nats")
    return logprobs


def _count(field: str, data: bytes) -> int:
    if len(data) % _SIZE_BYTES:
        requirement = f"a multiple of {_SIZE_BYTES} bytes"
        raise InvalidMessageError(field, f"{len(data)} bytes", requirement)
    return len(data) // _SIZE_BYTES
