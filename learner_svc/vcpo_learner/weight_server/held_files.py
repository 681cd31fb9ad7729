"""The files of weights that a server sends, and how it sends one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from vcpo.wire.checks import check_id
from vcpo.wire.errors import InvalidMessageError, NotFoundError
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.shared_file import SharedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A full set or a delta that can be fetched."""

    incarnation: str
    """Incarnation of the learner that numbers the versions."""
    policy_version: int
    base_policy_version: int | None
    """Version that a delta starts from; None for a full set."""
    file: SharedFile


async def chunks_of(
    file: SharedFile, request: policy_pb2.FetchRequest
) -> AsyncIterator[policy_pb2.PolicyChunk]:
    """Yield a file from the request's offset on; each chunk says up to which version it may be.

    Raises:
        InvalidMessageError: if the offset is behind the end.
    """
    if request.offset >= file.size_bytes:
        raise InvalidMessageError("offset", request.offset, f"less than {file.size_bytes}")
    for offset in range(request.offset, file.size_bytes, CHUNK_BYTES):
        data, newest_version = file.read(offset, CHUNK_BYTES)
        yield policy_pb2.PolicyChunk(policy_version=newest_version, offset=offset, data=data)


class FetchService(policy_pb2_grpc.PolicyServiceServicer):
    """Sends the files that it is told to hold. Owner: an event loop.

    A file that it holds no longer cannot be fetched any more; a fetch under way goes on.
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        """Bytes sent so far, by form: `full` or `delta`."""
        self._files: dict[tuple[str, int, int | None], SharedFile] = {}

    def hold(self, held: Iterable[HeldFile]) -> None:
        """Hold these files and no others."""
        self._files = {
            (each.incarnation, each.policy_version, each.base_policy_version): each.file
            for each in held
        }

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Refuse: only the learner describes versions."""
        raise NotFoundError("policy: this server has no manifests; ask the learner")

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a full set or a delta from an offset."""
        check_id("worker_id", request.worker_id)
        base = request.base_policy_version if request.HasField("base_policy_version") else None
        file = self._files.get((request.incarnation, request.policy_version, base))
        if file is None:
            raise NotFoundError(
                f"policy_version: {request.policy_version} is dropped or unknown; ask the learner"
                " for the newest"
            )
        form = "full" if base is None else "delta"
        async for chunk in chunks_of(file, request):
            yield chunk
            self.sent_bytes[form] += len(chunk.data)
