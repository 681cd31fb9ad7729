"""A worker's channel to the learner.

It trusts the authority that the worker's folder holds at that time, so an authority may be replaced
while the worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import grpc

from vcpo.wire.access.roles import new_key
from vcpo.wire.access.tls import CertificateFolder, Trust
from vcpo.wire.client import open_channel
from vcpo.wire.limits import CALL_TIMEOUT_S, MAX_WAIT_S

_GRACE_S: Final = CALL_TIMEOUT_S + MAX_WAIT_S
"""Time for calls to end on a channel that is replaced; the longest one waits for work."""


class LearnerChannel:
    """A channel to the learner, as far as the generated stubs use one.

    It is opened anew when the authority has changed. A call ends on the channel that it began on.

    certificates: None calls in plain text.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None,
        identity: str | None,
        certificates: CertificateFolder | None,
    ) -> None:
        self._address = address
        self._key = key
        self._identity = identity
        self._certificates = certificates
        self._trust = self._present_trust()
        self._channel = self._open()
        self._replaced: set[asyncio.Task[None]] = set()

    def unary_unary(self, path: str, **coding: Any) -> Callable[..., Any]:
        """Return the callable of a method, which picks the channel at each call."""

        def call(request: Any, **options: Any) -> Any:
            return self._current().unary_unary(path, **coding)(request, **options)

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel, and those that it has replaced."""
        for closing in self._replaced:
            closing.cancel()
        await self._channel.close()

    def _present_trust(self) -> Trust | None:
        return None if self._certificates is None else self._certificates.trust()

    def _current(self) -> grpc.aio.Channel:
        trust = self._present_trust()
        if trust != self._trust:
            closing = asyncio.create_task(self._channel.close(_GRACE_S))
            self._replaced.add(closing)
            closing.add_done_callback(self._replaced.discard)
            self._trust = trust
            self._channel = self._open()
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        return open_channel(
            self._address, key=self._key, identity=self._identity, trust=self._trust
        )


def worker_identity(file: Path | None) -> str:
    """Return a new key, or the one that an earlier process of this worker left in a file.

    file: where the key is kept, readable for this user alone; None keeps it in this process.

    Raises:
        OSError: if the file can neither be read nor made.
    """
    if file is None:
        return new_key()
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as created:
            created.write(new_key())
    # A process that was killed before it had written the key leaves an empty file.
    return file.read_text(encoding="ascii") or new_key()


def forget_identity(file: Path | None) -> None:
    """Remove the file, so that the next process of this worker has a key of its own."""
    if file is not None:
        file.unlink(missing_ok=True)
