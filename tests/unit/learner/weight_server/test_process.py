"""The process that sends weights: every byte, who is let in, and how it ends."""

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.fixtures.certificates import write_certificates
from vcpo.metrics.label_values import WeightForm
from vcpo.wire.access.roles import CallerRole, new_run_keys
from vcpo.wire.access.tls import CertificateFolder
from vcpo_learner.weight_server import __main__ as server_module
from vcpo_learner.weight_server import process as process_module
from vcpo_learner.weight_server.__main__ import WeightFileServer
from vcpo_learner.weight_server.process import WeightServer

DEADLINE_S = 60.0
CONTENT = os.urandom(8 << 20)
"""Of a full set: more than the buffers of a connection hold."""
DELTA = os.urandom(1000)
FULL_PATH, DELTA_PATH = "/now/0/00000000.full", "/now/0/00000000-00000001.delta"


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def publisher(folder, **options):
    """A folder of a full set and a delta, and the process that sends it."""
    files = folder / "now" / "0"
    files.mkdir(parents=True)
    (files / "00000000.full").write_bytes(CONTENT)
    (files / "00000000-00000001.delta").write_bytes(DELTA)
    server = WeightServer(folder, "127.0.0.1:0", **options)
    server.start()
    try:
        await server.address()
        yield server
    finally:
        await server.close(0.0)


class Transfer:
    """A request for a file, whose answer has begun."""

    def __init__(self, address, path, *, offset=0, key=None, tls=None, host="127.0.0.1"):
        port = int(address.rpartition(":")[2])
        if tls is None:
            self.connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
        else:
            context = CertificateFolder(tls).client_context()
            self.connection = http.client.HTTPSConnection(
                host, port, timeout=DEADLINE_S, context=context
            )
        headers = {"Range": f"bytes={offset}-"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self.connection.request("GET", path, headers=headers)
        self.answer = self.connection.getresponse()

    def rest(self):
        with contextlib.closing(self.connection):
            return self.answer.read()


async def fetch(address, path, **options):
    """Status and content of an answer."""

    def get():
        transfer = Transfer(address, path, **options)
        return transfer.answer.status, transfer.rest()

    return await asyncio.to_thread(get)


async def test_full_sets_and_deltas_arrive_bit_for_bit_from_any_offset(tmp_path):
    async with publisher(tmp_path) as server:
        address = await server.address()
        assert await fetch(address, FULL_PATH) == (206, CONTENT)
        assert await fetch(address, FULL_PATH, offset=1234567) == (206, CONTENT[1234567:])
        assert await fetch(address, DELTA_PATH) == (206, DELTA)
        await until(lambda: server.sent_bytes[WeightForm.DELTA] == len(DELTA))
        assert server.sent_bytes[WeightForm.FULL] == 2 * len(CONTENT) - 1234567


@pytest.mark.parametrize(
    ("path", "offset", "status"),
    [
        ("/now/0/00000009.full", 0, 404),
        ("/before/0/00000000.full", 0, 404),
        (FULL_PATH, len(CONTENT), 416),
        ("/", 0, 400),
        ("/now/0/secret.txt", 0, 400),
        ("/now/0/../0/00000000.full", 0, 400),
        ("/../now/0/00000000.full", 0, 400),
        ("/now/0/%2e%2e/00000000.full", 0, 400),
        (FULL_PATH, "0-9,20", 400),
    ],
)
async def test_nothing_is_sent_but_the_files_of_versions(tmp_path, path, offset, status):
    async with publisher(tmp_path) as server:
        (tmp_path / "now" / "0" / "secret.txt").write_text("of the learner")
        found, text = await fetch(await server.address(), path, offset=offset)
    assert found == status
    assert b"of the learner" not in text


async def test_a_file_that_is_removed_is_sent_to_its_end_by_who_has_begun_and_then_no_more(
    tmp_path,
):
    async with publisher(tmp_path) as server:
        transfer = await asyncio.to_thread(Transfer, await server.address(), FULL_PATH)
        (tmp_path / FULL_PATH[1:]).unlink()
        assert await asyncio.to_thread(transfer.rest) == CONTENT
        status, text = await fetch(await server.address(), FULL_PATH)
    assert (status, text) == (404, b"the version is retired; ask for the newest\n")


async def test_a_server_that_is_killed_during_a_transfer_is_followed_by_one_at_its_port(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    async with publisher(tmp_path, host="pod-1.ranks") as server:
        address = await server.address()
        assert address.startswith("pod-1.ranks:")
        transfer = await asyncio.to_thread(Transfer, address, FULL_PATH)
        arrived = bytearray(transfer.answer.read(1000))
        os.kill(server.process_id, signal.SIGKILL)
        with contextlib.suppress(OSError, http.client.HTTPException):
            while data := transfer.answer.read(1 << 16):
                arrived += data
        transfer.connection.close()
        assert len(arrived) < len(CONTENT)
        await until(lambda: server.num_starts == 2 and server.is_serving)
        assert await server.address() == address
        rest = await fetch(address, FULL_PATH, offset=len(arrived))
        assert rest == (206, CONTENT[len(arrived) :])
        await until(lambda: server.sent_bytes[WeightForm.FULL] >= len(rest[1]))


async def test_a_process_that_does_not_report_is_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    async with publisher(tmp_path) as server:
        monkeypatch.setattr(process_module, "_PATIENCE_S", 1.0)
        os.kill(server.process_id, signal.SIGSTOP)
        await until(lambda: server.num_starts >= 2)
        monkeypatch.setattr(process_module, "_PATIENCE_S", DEADLINE_S)
        await until(lambda: server.is_serving)
        assert "did not react" in caplog.text


async def test_a_process_that_hangs_before_it_serves_is_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(process_module, "_START_S", 0.001)
    server = WeightServer(tmp_path, "127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(
            TimeoutError, match=r"--weights-listen=127\.0\.0\.1:0: the process that"
        ):
            await server.address()
        await until(lambda: server.num_starts >= 2)
        monkeypatch.setattr(process_module, "_START_S", DEADLINE_S)
        assert "did not react for 0.001 s and is killed" in caplog.text
        await server.address()
    finally:
        await server.close(0.0)


async def test_a_process_that_cannot_listen_is_tried_again_until_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    server = WeightServer(tmp_path, f"127.0.0.1:{port}")
    server.start()
    try:
        await until(lambda: server.num_starts >= 2)
        taken.close()
        await taken.wait_closed()
        assert await server.address() == f":{port}"
    finally:
        await server.close(0.0)


async def test_a_running_transfer_ends_before_the_process_does(tmp_path):
    async with publisher(tmp_path) as server:
        transfer = await asyncio.to_thread(Transfer, await server.address(), FULL_PATH)
        closing = asyncio.create_task(server.close(DEADLINE_S))
        assert await asyncio.to_thread(transfer.rest) == CONTENT
        await closing
        assert server.process_id is None
        assert server.sent_bytes[WeightForm.FULL] == len(CONTENT)


async def test_over_tls_only_a_worker_of_the_run_is_let_in_and_a_new_certificate_is_served(
    tmp_path,
):
    keys = new_run_keys()
    tls = tmp_path / "tls"
    write_certificates(tls, ["localhost"])
    async with publisher(tmp_path / "files", tls=tls, keys=keys) as server:
        address = await server.address()

        async def answer(key):
            return await fetch(address, FULL_PATH, key=key, tls=tls, host="localhost")

        worker = keys[CallerRole.WORKER]
        assert await answer(worker) == (206, CONTENT)
        assert (await answer(None))[0] == 401
        assert (await answer(keys[CallerRole.STEERING]))[0] == 401  # not held by the process
        with pytest.raises((OSError, http.client.HTTPException)):
            await fetch(address, FULL_PATH, key=worker, host="localhost")
        write_certificates(tls, ["localhost"])  # of a new authority
        assert await answer(worker) == (206, CONTENT)


@pytest.fixture(params=[None])
def server_in_thread(tmp_path, request):
    (tmp_path / "now" / "0").mkdir(parents=True)
    (tmp_path / FULL_PATH[1:]).write_bytes(CONTENT)
    if request.param:
        write_certificates(tmp_path / request.param, ["localhost"])
    certificates = request.param and CertificateFolder(tmp_path / request.param)
    server = WeightFileServer(tmp_path, ("127.0.0.1", 0), {}, certificates)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_caller_that_stops_reading_is_given_up(server_in_thread, monkeypatch):
    monkeypatch.setattr(server_module.Handler, "timeout", 0.1)
    transfer = Transfer(f":{server_in_thread.server_address[1]}", FULL_PATH)
    server_in_thread.wait_for_transfers(DEADLINE_S)
    assert not server_in_thread._num_connections
    assert 0 < server_in_thread._sent_bytes["full"] < len(CONTENT)
    transfer.connection.close()


@pytest.mark.parametrize("server_in_thread", [None, "tls"], indirect=True)
def test_a_connection_that_has_shown_no_key_gives_way_and_one_that_has_does_not(
    server_in_thread, monkeypatch, tmp_path
):
    monkeypatch.setattr(server_module, "MAX_WEIGHT_CONNECTIONS", 1)
    port = server_in_thread.server_address[1]
    folder = tmp_path / "tls"
    options = {"tls": folder, "host": "localhost"} if folder.exists() else {}
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(DEADLINE_S)
        begun = Transfer(f":{port}", FULL_PATH, **options)
        assert stranger.recv(1) == b""
    with pytest.raises((OSError, http.client.HTTPException)):
        Transfer(f":{port}", FULL_PATH, **options)
    assert begun.rest() == CONTENT
    server_in_thread.wait_for_transfers(DEADLINE_S)
    assert Transfer(f":{port}", FULL_PATH, **options).rest() == CONTENT


PARENT = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from vcpo.api.workloads import Weights
    from vcpo_learner.weight_server.process import WeightServer
    from vcpo_learner.weights.store import VersionFolder

    async def main():
        folder = VersionFolder.open(
            Weights(), "run", Path(sys.argv[1]), incarnation="now", shard=0
        )
        folder.write("00000000.full", bytes(1 << 20))
        server = WeightServer(folder.served_root, "127.0.0.1:0", removed=Path(folder.url))
        server.start()
        await server.address()
        print(server.process_id, folder.url, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
""")


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_process_and_no_memory_behind(tmp_path, number, is_stopped):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process_id, folder = parent.stdout.readline().split()
    assert Path(folder, "00000000.full").exists()
    os.kill(int(process_id), signal.SIGTERM)  # which is for the parent
    if is_stopped:
        os.kill(int(process_id), signal.SIGSTOP)
    parent.send_signal(number)
    assert parent.wait() == -number
    deadline_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{process_id}/maps").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    parent.stdout.close()
    assert not Path(f"/proc/{process_id}").exists()
    assert not Path(folder).parents[1].exists()


def test_the_process_loads_no_library_for_tensors():
    code = (
        "import sys, vcpo_learner.weight_server.__main__ as _;"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout == b"[]\n"
