"""The process that sends weights: every byte, who is let in, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import safetensors.numpy

from tests.fixtures.certificates import write_certificates
from vcpo.metrics.label_values import WeightForm
from vcpo.wire.access.roles import CallerRole, new_run_keys
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.client import open_channel
from vcpo.wire.guard import CallRefusal
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import verify
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.shared_file import SharedFile
from vcpo_learner.weight_server import process as process_module
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.weights.deltas import apply_deltas

INCARNATION = "now"
DEADLINE_S = 60.0
NUM_ELEMENTS = 4 * CHUNK_BYTES
LISTEN = "127.0.0.1:0"


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


class Publisher:
    """A store of one float16 tensor of eight chunks, and the process that sends it."""

    def __init__(self, **options):
        self.store = PolicyStore(incarnation=INCARNATION, clock=time.monotonic)
        self.server = WeightServer(LISTEN, **options)
        self.server.start()
        self.server.tell([])

    async def publish(self, version, weights):
        prepared = await asyncio.to_thread(self.store.prepare, version, weights)
        assert await self.server.hold(self.store.held_files(prepared))
        self.store.publish(prepared)
        self.server.tell(self.store.held_files())
        return prepared

    async def publish_first(self):
        weight = np.random.default_rng(0).integers(0, 1 << 16, NUM_ELEMENTS).astype("<u2")
        file = SharedFile.of(safetensors.numpy.save({"weight": weight}))
        self.server.tell(self.store.held_files())
        await until(lambda: self.server.process_id is not None and self.server._current.port)
        return await self.publish(0, file)

    def changes(self, version):
        """One element in a hundred, all over the tensor."""
        draw = np.random.default_rng(version)
        positions = np.sort(draw.choice(NUM_ELEMENTS, NUM_ELEMENTS // 100, replace=False))
        bits = draw.integers(0, 1 << 16, len(positions)).astype("<u2")
        return {"weight": ChangedElements(positions=positions, bits=bits)}

    def channel(self, **options):
        address = f"127.0.0.1{self.server.address_of(self.store.newest.policy_version)}"
        return open_channel(address, key=options.pop("key", None), **options)


@contextlib.asynccontextmanager
async def publisher(**options):
    made = Publisher(**options)
    try:
        await made.publish_first()
        yield made
    finally:
        await made.server.close(0.0)


def request_for(version, base=None, offset=0):
    return policy_pb2.FetchRequest(
        worker_id="w",
        incarnation=INCARNATION,
        policy_version=version,
        base_policy_version=base,
        offset=offset,
    )


async def fetch(channel, request, *, after_chunk=None):
    """All bytes of a fetch and the newest version that they may hold."""
    call = policy_pb2_grpc.PolicyServiceStub(channel).Fetch(request, timeout=DEADLINE_S)
    content, newest = bytearray(), 0
    async for chunk in call:
        assert chunk.offset == request.offset + len(content)
        content += chunk.data
        newest = max(newest, chunk.policy_version)
        if after_chunk is not None:
            await after_chunk()
    return content, newest


async def test_full_sets_and_deltas_arrive_bit_for_bit_from_any_offset():
    async with publisher() as made:
        first = bytes(made.store.newest.full_set.buffer)
        later = await made.publish(1, made.changes(1))
        async with made.channel() as channel:
            whole, newest = await fetch(channel, request_for(1))
            tail, _ = await fetch(channel, request_for(1, offset=CHUNK_BYTES + 3))
            delta, _ = await fetch(channel, request_for(1, base=0))
        assert newest == 1
        verify(whole, later.manifest)
        assert tail == whole[CHUNK_BYTES + 3 :]
        patched = bytearray(first)
        apply_deltas(patched, [bytes(delta)])
        assert patched == whole
        await until(lambda: made.server.sent_bytes[WeightForm.DELTA] == len(delta))
        assert made.server.sent_bytes[WeightForm.FULL] == len(whole) + len(tail)


async def test_a_set_that_is_patched_while_it_is_sent_becomes_the_later_version_by_its_deltas():
    async with publisher() as made, made.channel() as channel:
        versions = iter(range(1, 8))

        async def patch():
            if (version := next(versions, None)) is not None:
                await made.publish(version, made.changes(version))

        content, newest = await fetch(channel, request_for(0), after_chunk=patch)
        assert newest > 0
        with pytest.raises(ValueError, match="differs"):
            verify(content, made.store.newest.manifest)
        deltas = [
            bytes((await fetch(channel, request_for(version, base=version - 1)))[0])
            for version in range(1, 8)
        ]
        apply_deltas(content, deltas)
        verify(content, made.store.newest.manifest)


async def test_a_version_that_is_dropped_cannot_be_fetched_but_a_fetch_of_it_ends_whole():
    async with publisher() as made, made.channel() as channel:
        first = bytes(made.store.newest.full_set.buffer)
        files = list(made.store.held_files())

        async def drop():
            assert await made.server.hold([])

        content, _ = await fetch(channel, request_for(0), after_chunk=drop)
        assert content == first
        with pytest.raises(grpc.aio.AioRpcError, match="0 is dropped or unknown"):
            await fetch(channel, request_for(0))
        assert made.server.address_of(0) == ""
        assert await made.server.hold(files)
        assert (await fetch(channel, request_for(0)))[0] == first


async def test_a_server_that_is_killed_during_a_fetch_is_followed_by_one_that_sends_the_rest(
    monkeypatch,
):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    async with publisher() as made:
        first = bytes(made.store.newest.full_set.buffer)
        arrived = bytearray()
        async with made.channel() as channel:
            call = policy_pb2_grpc.PolicyServiceStub(channel).Fetch(
                request_for(0), timeout=DEADLINE_S
            )
            arrived += (await call.read()).data
            os.kill(made.server.process_id, signal.SIGKILL)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while True:
                    arrived += (await call.read()).data
        assert len(arrived) < len(first)
        await until(lambda: made.server.num_starts == 2 and made.server.address_of(0))
        async with made.channel() as channel:
            rest, _ = await fetch(channel, request_for(0, offset=len(arrived)))
        assert arrived + rest == first
        await until(lambda: made.server.sent_bytes[WeightForm.FULL] >= len(rest))


async def test_a_process_that_follows_a_killed_one_listens_where_manifests_name_it(monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    server = WeightServer("127.0.0.1:0", host="pod-1.ranks", keeps_port=True)
    store = PolicyStore(incarnation=INCARNATION, clock=time.monotonic)
    store.publish(store.prepare(3, SharedFile.of(safetensors.numpy.save({}))))
    server.start()
    try:
        server.tell(store.held_files())
        await until(lambda: server.address_of(3))
        address = server.address_of(3)
        os.kill(server.process_id, signal.SIGKILL)
        await until(lambda: server.num_starts == 2 and server.address_of(3))
        assert server.address_of(3) == address
    finally:
        await server.close(0.0)


async def test_while_there_is_no_process_no_address_is_named_and_nothing_waits(monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", DEADLINE_S)
    async with publisher() as made:
        os.kill(made.server.process_id, signal.SIGKILL)
        await until(lambda: made.server.process_id is None)
        assert made.server.address_of(0) == ""
        assert not await made.server.hold(made.store.held_files())


async def test_a_process_that_does_not_react_is_replaced(monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(process_module, "_PATIENCE_S", 0.2)
    async with publisher() as made:
        os.kill(made.server.process_id, signal.SIGSTOP)
        assert not await made.server.hold(made.store.held_files())
        monkeypatch.setattr(process_module, "_PATIENCE_S", DEADLINE_S)
        await until(lambda: made.server.num_starts == 2 and made.server.address_of(0))


async def test_a_process_that_hangs_before_it_serves_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(process_module, "_START_S", 0.2)
    made = Publisher()
    try:
        await until(lambda: made.server.process_id is not None)
        os.kill(made.server.process_id, signal.SIGSTOP)
        await until(lambda: made.server.num_starts >= 2)
        monkeypatch.setattr(process_module, "_START_S", DEADLINE_S)
        assert "did not serve within 0.2 s and is killed" in caplog.text
        weights = SharedFile.of(safetensors.numpy.save({"w": np.zeros(4, np.float16)}))
        made.store.publish(made.store.prepare(0, weights))
        made.server.tell(made.store.held_files())
        await until(lambda: made.server.address_of(0))
    finally:
        await made.server.close(0.0)


async def test_a_process_that_cannot_listen_is_tried_again_until_it_can(monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.0)
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    server = WeightServer(f"127.0.0.1:{port}", host="pod-1.ranks")
    server.start()
    try:
        server.tell([])
        await until(lambda: server.num_starts >= 2)
        taken.close()
        await taken.wait_closed()
        store = PolicyStore(incarnation=INCARNATION, clock=time.monotonic)
        store.publish(store.prepare(3, SharedFile.of(safetensors.numpy.save({}))))
        server.tell(store.held_files())
        await until(lambda: server.address_of(3))
        assert server.address_of(3) == f"pod-1.ranks:{port}"
    finally:
        await server.close(0.0)


async def test_a_running_fetch_ends_before_the_process_does():
    made = Publisher()
    await made.publish_first()
    first = bytes(made.store.newest.full_set.buffer)
    async with made.channel() as channel:
        call = policy_pb2_grpc.PolicyServiceStub(channel).Fetch(request_for(0), timeout=DEADLINE_S)
        content = bytearray((await call.read()).data)
        closing = asyncio.create_task(made.server.close(DEADLINE_S))
        while (chunk := await call.read()) is not grpc.aio.EOF:
            content += chunk.data
    await closing
    assert content == first
    assert made.server.process_id is None
    assert made.server.sent_bytes[WeightForm.FULL] == len(first)


async def test_over_tls_only_a_worker_of_the_run_is_let_in_and_a_new_certificate_is_served(
    tmp_path,
):
    keys = new_run_keys()
    folder = tmp_path / "tls"
    write_certificates(folder, ["localhost"])
    async with publisher(tls=folder, keys=keys) as made:

        async def code_of(key, identity="me"):
            trust = CertificateFolder(folder).trust("localhost")
            async with made.channel(key=key, identity=identity, trust=trust) as channel:
                try:
                    content, _ = await fetch(channel, request_for(0))
                except grpc.aio.AioRpcError as error:
                    return error.code()
                assert content == made.store.newest.full_set.buffer
                return grpc.StatusCode.OK

        worker = keys[CallerRole.WORKER]
        assert await code_of(worker) is grpc.StatusCode.OK
        assert await code_of(None) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(worker, identity=None) is grpc.StatusCode.UNAUTHENTICATED
        for role in (CallerRole.STEERING, CallerRole.PEER):  # the process does not hold their keys
            assert await code_of(keys[role]) is grpc.StatusCode.UNAUTHENTICATED
        await until(lambda: made.server.refusals[CallRefusal.KEY] == 4)
        async with made.channel(key=worker, identity="me") as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await fetch(plain, request_for(0))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        write_certificates(folder, ["localhost"])  # of a new authority
        assert await code_of(worker) is grpc.StatusCode.OK


async def test_descriptions_are_the_learners_alone():
    async with publisher() as made, made.channel() as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="ask the learner"):
            await stub.GetManifest(policy_pb2.GetManifestRequest(worker_id="w"), timeout=DEADLINE_S)


PARENT = textwrap.dedent("""
    import asyncio, time
    from vcpo_learner.shared_file import SharedFile
    from vcpo_learner.weight_server.process import WeightServer
    from vcpo_learner.weights.store import PolicyStore
    import safetensors.numpy, numpy

    async def main():
        store = PolicyStore(incarnation="now", clock=time.monotonic)
        content = safetensors.numpy.save({"weight": numpy.zeros(1 << 20)})
        store.publish(store.prepare(0, SharedFile.of(content)))
        server = WeightServer("127.0.0.1:0")
        server.start()
        server.tell(store.held_files())
        while not server.address_of(0):
            await asyncio.sleep(0.01)
        print(server.process_id, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
""")


def mapped_weights(maps):
    """Inodes of the weights that a process has mapped; none of a process that may not be read."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in maps.read_text().splitlines()]
        return {line[4] for line in lines if len(line) > 5 and "vcpo-weights" in line[5]}
    return set()


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_process_and_no_memory_behind(number, is_stopped):
    before = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    process_id = int(parent.stdout.readline())
    maps = Path(f"/proc/{process_id}/maps")
    memory = mapped_weights(maps)
    assert memory
    os.kill(process_id, signal.SIGTERM)  # which is for the parent
    if is_stopped:
        os.kill(process_id, signal.SIGSTOP)
    parent.send_signal(number)
    assert parent.wait() == -number
    deadline_s = time.monotonic() + DEADLINE_S
    while maps.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    parent.stdout.close()
    assert not Path(f"/proc/{process_id}").exists()
    assert set(Path("/dev/shm").iterdir()) == before


def test_the_process_loads_no_library_for_tensors():
    code = (
        "import sys, vcpo_learner.weight_server.__main__ as _;"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout == b"[]\n"
