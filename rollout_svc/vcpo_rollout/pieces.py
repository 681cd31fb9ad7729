"""What weights travel in: full sets and deltas, each growing as its bytes arrive."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.wire.weights import CorruptWeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceKey:
    """What a piece is."""

    incarnation: str
    policy_version: int
    base_policy_version: int | None
    """What a delta starts from; None for the full set."""


class Piece:
    """Bytes of one full set or delta, from the first on. Owner: the worker's event loop.

    Nobody may trust them: who received them checks what they make against a manifest.
    """

    def __init__(self, key: PieceKey, total_bytes: int) -> None:
        self.key = key
        self.total_bytes = total_bytes
        self._arrived: bytes | bytearray = bytearray()

    @property
    def num_arrived(self) -> int:
        """Bytes that are there."""
        return len(self._arrived)

    @property
    def is_complete(self) -> bool:
        """Whether every byte is there."""
        return self.num_arrived == self.total_bytes

    def content(self) -> bytes:
        """What has arrived; nothing can be added after."""
        self._arrived = bytes(self._arrived)
        return self._arrived

    def extend(self, offset: int, data: bytes) -> None:
        """Add the bytes that follow those that are there.

        Raises:
            CorruptWeightsError: when they do not follow, or are more than there can be.
        """
        end = offset + len(data)
        if offset != self.num_arrived or end > self.total_bytes:
            raise CorruptWeightsError(
                f"chunk: bytes {offset} to {end} do not follow {self.num_arrived} of"
                f" {self.total_bytes}"
            )
        assert isinstance(self._arrived, bytearray)  # a complete piece has room for no chunk
        self._arrived += data
