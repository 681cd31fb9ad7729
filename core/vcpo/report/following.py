"""A report that is served on this machine's loopback address and follows its run.

The page asks for itself every two seconds. It is rendered again only when a record was written, and
so seldom that it takes a twentieth of one core at most, because the run needs the cores. All other
answers are a few bytes (304). A browser of another machine cannot reach the server, and a
page of another site cannot read it: the name in a request must be one of the loopback address.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vcpo.api import SpecError
from vcpo.records.journal import EVENTS_FILE, METRICS_FILE
from vcpo.report.recorded_run import SPEC_FILE

LOOPBACK = "127.0.0.1"
_NAMES = (LOOPBACK, "localhost")
_PAUSE_SHARE = 19.0
"""The page is not rendered again for so many times as long as rendering took."""


class FollowedPage:
    """A page that is rendered again when a file of its run has changed.

    Owner: any thread; one renders at a time.
    """

    def __init__(
        self,
        run_dir: Path,
        render: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [run_dir / name for name in (SPEC_FILE, METRICS_FILE, EVENTS_FILE)]
        self._render = render
        self._clock = clock
        self._lock = threading.Lock()
        self._body = b""
        self._tag = ""
        self._due_s = -math.inf
        """Earliest time at which the page may be rendered again."""

    def tag(self) -> str:
        """Return a text that is different after every change of a file that is due to be shown."""
        if self._clock() < self._due_s:
            return self._tag
        stats = [path.stat() if path.exists() else None for path in self._paths]
        stamps = [(stat.st_mtime_ns, stat.st_size) if stat else None for stat in stats]
        return f'"{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"'

    def body(self, tag: str) -> bytes:
        """Return the page as of a tag, which is rendered at most once."""
        with self._lock:
            if tag != self._tag:
                started_s = self._clock()
                self._body, self._tag = self._render().encode(), tag
                ended_s = self._clock()
                self._due_s = ended_s + _PAUSE_SHARE * (ended_s - started_s)
            return self._body


class PageServer(ThreadingHTTPServer):
    """Serves one page on the loopback address; a context manager that closes the port."""

    daemon_threads = True

    def __init__(self, page: FollowedPage, port: int) -> None:
        """Open the port; 0 takes a free one. Raises: OSError if it is taken."""
        self.page = page
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "vcpo"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, or with 304 if the browser has its present form."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1")
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND, "there is one page, /")
        elif (tag := self.server.page.tag()) == self.headers.get("If-None-Match"):
            self._send(HTTPStatus.NOT_MODIFIED, tag, b"")
        else:
            try:
                body = self.server.page.body(tag)
            except (SpecError, OSError) as error:  # records can be read again later
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            else:
                self._send(HTTPStatus.OK, tag, body)

    def _send(self, status: HTTPStatus, tag: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        if status is HTTPStatus.OK:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  the base's name
        """Write nothing: a line every two seconds would hide the others."""
