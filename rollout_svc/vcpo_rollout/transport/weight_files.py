"""Reads files of versions: in the folder where they were written, or from the learner's server.

```
folder is a URL, or this machine sees it ---> read there (fsspec)
otherwise ----------------------------------> GET, with Range, from the manifest's server
```

What has arrived stays when a transfer breaks, and the next call reads the rest. Nobody is trusted:
whoever uses the bytes checks them against the manifest.
"""

import asyncio
import http.client
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from typing import Final

import fsspec

from vcpo.metrics.label_values import WeightSource
from vcpo.wire.access.roles import authorization
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.limits import CHUNK_BYTES, SILENCE_S
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.gauges import RolloutGauges

_SHOWN_BYTES: Final = 200
"""How much of a refusal's text is shown."""


class RetiredVersionError(Exception):
    """A file is gone, because the learner has newer versions; ask for the newest manifest."""


@dataclass(slots=True, kw_only=True, eq=False)
class ArrivingFile:
    """A file of a version, whole or on its way.

    Raises:
        CorruptWeightsError: when it does not fit into this machine's memory.
    """

    name: str
    total_bytes: int
    content: bytearray = field(init=False)
    """The bytes, of which `num_arrived` have arrived."""
    num_arrived: int = 0

    def __post_init__(self) -> None:
        try:
            self.content = bytearray(self.total_bytes)
        except (MemoryError, OverflowError) as error:
            raise CorruptWeightsError(
                f"total_bytes: must fit into memory, got {self.total_bytes}"
            ) from error

    def read_from(
        self, read_into: Callable[[memoryview], int | None], stop: threading.Event
    ) -> None:
        """Read the missing bytes in order.

        read_into: fills a buffer as far as it can, and returns how many bytes it has read.
        """
        with memoryview(self.content) as view:
            while self.num_arrived < self.total_bytes and not stop.is_set():
                num_bytes = read_into(view[self.num_arrived : self.num_arrived + CHUNK_BYTES])
                if not num_bytes:
                    raise OSError(
                        f"{self.name}: ended after {self.num_arrived} of {self.total_bytes} bytes"
                    )
                self.num_arrived += num_bytes


@dataclass(slots=True, eq=False)
class WeightFiles:
    """Reads the files that manifests name.

    learner: `host:port` at which the worker reaches the learner.
    key: the run's, of workers; None shows none.
    certificates: None calls in plain text.
    """

    learner: str
    gauges: RolloutGauges
    _: KW_ONLY
    key: str | None = field(default=None, repr=False)
    certificates: CertificateFolder | None = None

    async def read(
        self, manifest: policy_pb2.PolicyManifest, files: Sequence[ArrivingFile]
    ) -> None:
        """Read the missing bytes of files, in order.

        manifest: of the shard whose files they are.

        Raises:
            RetiredVersionError: when one of them is gone.
            CorruptWeightsError: when one of them has another size.
        """
        source, read = WeightSource.SERVER, self._get
        if is_seen(manifest.folder):
            source, read = WeightSource.STORE, _read_in_place
        stop = threading.Event()
        before = sum(file.num_arrived for file in files)
        try:
            await asyncio.to_thread(read, manifest, files, stop)
        except http.client.HTTPException as error:
            raise OSError(f"{manifest.address}: {type(error).__name__}: {error}") from error
        finally:
            stop.set()  # the thread outlives a cancelled call
            num_bytes = sum(file.num_arrived for file in files) - before
            self.gauges.metrics.weight_sync_bytes.labels(source).inc(num_bytes)

    def _get(
        self,
        manifest: policy_pb2.PolicyManifest,
        files: Sequence[ArrivingFile],
        stop: threading.Event,
    ) -> None:
        """Read files over one connection to the server."""
        connection = self._connection(manifest)
        headers = dict([authorization(self.key)]) if self.key else {}
        try:
            for file in files:
                if file.num_arrived == file.total_bytes:
                    continue
                path = f"/{manifest.incarnation}/{manifest.shard}/{file.name}"
                ranged = headers | {"Range": f"bytes={file.num_arrived}-"}
                connection.request("GET", path, headers=ranged)
                response = connection.getresponse()
                _check_answer(response, file)
                file.read_from(response.readinto, stop)
        finally:
            connection.close()

    def _connection(self, manifest: policy_pb2.PolicyManifest) -> http.client.HTTPConnection:
        if not manifest.address:
            raise OSError(f"this worker does not see {manifest.folder}, and nobody sends its files")
        host, port = server_address(manifest.address, self.learner)
        if self.certificates is None:
            return http.client.HTTPConnection(host, port, timeout=SILENCE_S)
        context = self.certificates.client_context()
        return http.client.HTTPSConnection(host, port, timeout=SILENCE_S, context=context)


def is_seen(folder: str) -> bool:
    """Return whether this machine can read a folder, given as a path or a URL."""
    return "://" in folder or os.access(folder, os.R_OK | os.X_OK)


def server_address(address: str, learner: str) -> tuple[str, int]:
    """Return the host and port that an address in a manifest stands for.

    address: `host:port`; `:port` is a port on the learner's host.
    learner: `host:port` at which the worker reaches the learner.
    """
    host, _, port = address.rpartition(":")
    return (host or learner.rpartition(":")[0]).strip("[]"), int(port)


def _check_answer(response: http.client.HTTPResponse, file: ArrivingFile) -> None:
    """Check that a server sends the rest of a file; raises as `WeightFiles.read`."""
    if response.status == HTTPStatus.NOT_FOUND:
        raise RetiredVersionError(file.name)
    if response.status != HTTPStatus.PARTIAL_CONTENT:
        text = response.read(_SHOWN_BYTES).decode("utf-8", "replace").strip()
        raise OSError(f"{file.name}: the server answered {response.status}: {text}")
    _check_size(response.headers.get("Content-Range", "").rpartition("/")[2], file)


def _check_size(size_bytes: str | int, file: ArrivingFile) -> None:
    if str(size_bytes) != str(file.total_bytes):
        raise CorruptWeightsError(
            f"{file.name}: must be {file.total_bytes} bytes, is {str(size_bytes)!r:.40}"
        )


def _read_in_place(
    manifest: policy_pb2.PolicyManifest, files: Sequence[ArrivingFile], stop: threading.Event
) -> None:
    store, folder = fsspec.core.url_to_fs(manifest.folder)
    for file in files:
        path = f"{folder}/{file.name}"
        try:
            with store.open(path, "rb") as opened:
                _check_size(opened.seek(0, os.SEEK_END), file)
                opened.seek(file.num_arrived)
                file.read_from(opened.readinto, stop)
        except FileNotFoundError as error:
            raise RetiredVersionError(path) from error
