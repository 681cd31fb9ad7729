"""The chart as an archive, and as an artifact in a registry that speaks OCI's protocol."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import helm_python
import pytest

from scripts.package_chart import package_chart
from tests.fixtures.chart.rendering import NAMESPACE, render_files

NOT_FOUND, OK, CREATED, ACCEPTED = 404, 200, 201, 202


class Registry(BaseHTTPRequestHandler):
    """Blobs and manifests by path; what a push and a pull need of the distribution API."""

    held: dict[str, tuple[str, bytes]]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        self._answer(ACCEPTED, Location=f"{self.path.rstrip('/')}/upload")

    def do_PUT(self) -> None:
        parts, body = urlsplit(self.path), self._body()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        folder, _, name = parts.path.rpartition("/")
        place = folder.replace("/uploads", "") if name == "upload" else folder
        assert parse_qs(parts.query).get("digest", [digest]) == [digest]
        for key in (digest, name):
            self.held[f"{place}/{key}"] = (self.headers["Content-Type"], body)
        self._answer(CREATED, Location=f"{place}/{digest}")

    def do_GET(self) -> None:
        kind, body = self.held.get(urlsplit(self.path).path, ("", b""))
        if urlsplit(self.path).path == "/v2/":
            return self._answer(OK)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        headers = {"Content-Type": kind, "Docker-Content-Digest": digest}
        return self._answer(OK if kind else NOT_FOUND, body, **headers)

    do_HEAD = do_GET  # noqa: N815 - the server's name

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(name="registry")
def running_registry() -> Iterator[str]:
    Registry.held = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"oci://127.0.0.1:{server.server_port}/ml"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_chart_that_was_pushed_and_pulled_renders_the_same_objects(registry: str, tmp_path: Path):
    archive = package_chart(tmp_path)
    helm_python.push(archive, registry, plain_http=True)
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    helm_python.pull(f"{registry}/vcpo", version="0.1.0", destination=pulled, plain_http=True)
    (found,) = pulled.iterdir()
    assert (found.name, found.read_bytes()) == ("vcpo-0.1.0.tgz", archive.read_bytes())
    with helm_python.Chart.load(found) as chart:
        files = chart.render({}, name="vcpo", namespace=NAMESPACE)
    assert list(files.values()) == list(render_files().values())
