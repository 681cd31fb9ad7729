"""`python -m vcpo_learner.weight_server`: send the files of versions from a folder over HTTP.

It sends nothing but files of versions (`vcpo.wire.weights.FILE_PATH`), by ranges, to callers with
the key of workers. What the rank removes is read to its end by whoever has begun.

Standard output is a line of JSON for each report, and the last one follows within a second:

```
{"port": 7620}                         it serves
{"sent_bytes": {"full": 9000}}         since its start
```

Standard input is a number of seconds in which transfers may end, and then the process ends. Its end
without a number is the end of the parent. Stop signals are for the parent alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from vcpo.service import logs
from vcpo.service.lifecycle import (
    StartError,
    report_start_error,
    split_address,
    start_errors,
    wake_at_parent_exit,
)
from vcpo.wire.access.roles import AUTHORIZATION, CallerRole, keys_from_environment, role_of
from vcpo.wire.access.tls import CertificateFolder, checked_folder
from vcpo.wire.limits import MAX_WEIGHT_CONNECTIONS, SILENCE_S
from vcpo.wire.weights import FILE_PATH

_LOGGER = logging.getLogger(__name__)
_REPORT_S: Final = 0.5
_COUNTED_BYTES: Final = 64 << 20
"""Bytes after which a transfer is counted."""
_RANGE = re.compile(r"bytes=([0-9]{1,19})-")


def main() -> int:
    """Serve until the parent says stop or ends; return the exit status."""
    wake_at_parent_exit()
    parser = argparse.ArgumentParser(prog="python -m vcpo_learner.weight_server")
    parser.add_argument("folder", type=Path, help="folder of the incarnations")
    parser.add_argument("--listen", required=True, help="host:port; port 0: any free one")
    parser.add_argument("--tls", type=Path, help="folder of the certificates")
    parser.add_argument("--plain-text", action="store_true", help="as the learner's option")
    parser.add_argument("--remove", type=Path, help="folder to remove at the end")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    reports = _Reports()
    logging.basicConfig(handlers=[logs.line_handler()], level=logging.INFO)
    try:
        with start_errors():
            server = _server(options)
    except StartError as error:
        return report_start_error(error)
    reports.send(port=server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=_report, args=(server, reports), daemon=True).start()
    told = sys.stdin.readline()
    server.shutdown()
    server.wait_for_transfers(float(told) if told else 0.0)
    server.report(reports)
    if options.remove is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
        for parent in options.remove.parents[:2]:  # of the incarnation and the run, if empty
            with contextlib.suppress(OSError):
                parent.rmdir()
    return 0


def _server(options: argparse.Namespace) -> WeightFileServer:
    certificates = checked_folder(
        {"--listen": options.listen}, options.tls, plain_text=options.plain_text
    )
    keys = keys_from_environment([CallerRole.WORKER])
    return WeightFileServer(options.folder, split_address(options.listen), keys, certificates)


class _Reports:
    """Writes reports to what was standard output; what is printed later goes to the log."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def send(self, **report: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, json.dumps(report).encode() + b"\n")


def _report(server: WeightFileServer, reports: _Reports) -> None:
    while True:
        time.sleep(_REPORT_S)
        server.report(reports)


class WeightFileServer(ThreadingHTTPServer):
    """Sends the files of versions below a folder; a thread for each connection.

    keys: that of workers; empty lets everybody in.
    certificates: those to serve with; None serves in plain text.
    handler: answers the requests.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        folder: Path,
        address: tuple[str, int],
        keys: Mapping[CallerRole, str],
        certificates: CertificateFolder | None,
        *,
        handler: type[Handler] | None = None,
    ) -> None:
        self.folder = folder
        self.keys = keys
        self._certificates = certificates
        self._context = None if certificates is None else certificates.server_context()
        self._lock = threading.Lock()
        self._sent_bytes: Counter[str] = Counter()
        self._num_connections = 0
        self._strangers: dict[tuple[Any, ...], socket.socket] = {}
        """Connections that have shown no key yet, the oldest first, by the caller's address."""
        host, port = address
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host.strip("[]"), port), handler or Handler)

    def count_sent(self, form: str, num_bytes: int) -> None:
        with self._lock:
            self._sent_bytes[form] += num_bytes

    def report(self, reports: _Reports) -> None:
        with self._lock:
            sent = dict(self._sent_bytes)
        reports.send(sent_bytes=sent)

    def wait_for_transfers(self, grace_s: float) -> None:
        """Wait until no connection is left, for `grace_s` seconds at most."""
        deadline_s = time.monotonic() + grace_s
        while self._num_connections and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def secure(self, connection: socket.socket, client_address: Any) -> socket.socket:
        """Return the connection with TLS, by the certificate that the files hold now.

        The first read shakes hands.
        """
        if self._certificates is None:
            return connection
        try:
            self._context = self._certificates.server_context()
        except OSError as error:
            _LOGGER.warning("the certificate in use stays: %s", error)
        assert self._context is not None
        with self._lock:  # the plain socket is none afterwards, and could not be shut down
            secured = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
            if client_address in self._strangers:
                self._strangers[client_address] = secured
        return secured

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread; of too many the oldest without a key gives way."""
        with self._lock:
            has_room = self._num_connections < MAX_WEIGHT_CONNECTIONS
            if not has_room and (has_room := bool(self._strangers)):
                oldest = self._strangers.pop(next(iter(self._strangers)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            if has_room:
                self._num_connections += 1
                self._strangers[client_address] = request
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._num_connections -= 1
                self._strangers.pop(client_address, None)

    def keep(self, client_address: Any) -> None:
        """Let a connection that has shown the key stay to its end."""
        with self._lock:
            self._strangers.pop(client_address, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection; one that breaks is nothing special."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _LOGGER.error("a request failed", exc_info=error)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: WeightFileServer
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S

    def setup(self) -> None:
        """Begin with TLS, if there is any."""
        self.request.settimeout(self.timeout)
        self.request = self.server.secure(cast("socket.socket", self.request), self.client_address)
        super().setup()

    def finish(self) -> None:
        """End TLS too; the server closes the socket below."""
        super().finish()
        if isinstance(self.request, ssl.SSLSocket):
            self.request.close()

    def do_GET(self) -> None:
        """Send a file from an offset on."""
        keys = self.server.keys
        if keys and role_of(self.headers.get(AUTHORIZATION, ""), keys) is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "show the key of the run's workers")
            return
        self.server.keep(self.client_address)
        found = FILE_PATH.fullmatch(self.path)
        wanted = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        if found is None or wanted is None:
            self._refuse(HTTPStatus.BAD_REQUEST, "ask for a file of a version, from an offset on")
            return
        try:
            file = (self.server.folder / self.path[1:]).open("rb")
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "the version is retired; ask for the newest")
            return
        with file:
            self._send(file, int(wanted[1]), found["form"])

    def _send(self, file: BinaryIO, offset: int, form: str) -> None:
        size_bytes = os.fstat(file.fileno()).st_size
        if offset >= size_bytes:
            text = f"the file has {size_bytes} bytes"
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, text)
            return
        self._send_head(offset, size_bytes)
        while offset < size_bytes:
            num_bytes = 0
            try:
                num_bytes = self.connection.sendfile(file, offset, _COUNTED_BYTES)
            finally:
                # Where sending broke off, the file stands behind what was sent.
                sent = num_bytes or max(file.tell() - offset, 0)
                self.server.count_sent(form, sent)
            if not num_bytes:
                raise OSError("the file is shorter than it was")
            offset += num_bytes

    def _send_head(self, offset: int, size_bytes: int) -> None:
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size_bytes - offset))
        self.send_header("Content-Range", f"bytes {offset}-{size_bytes - 1}/{size_bytes}")
        self.end_headers()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        body = text.encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log nothing: the counts say what there is to say."""


if __name__ == "__main__":
    raise SystemExit(main())
