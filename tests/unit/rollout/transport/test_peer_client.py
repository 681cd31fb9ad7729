"""Workers pass weights on over real channels; the version arrives whatever a peer does."""

import asyncio
import contextlib

import grpc
import pytest

from tests.fixtures.learner.dispatcher import INCARNATION, ManualClock
from tests.fixtures.rollout.policy_versions import FailingService, payload_of, publish, store_of
from tests.fixtures.rollout.worker import quick_retries, serve_services
from vcpo.metrics import RolloutMetrics
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.peer_client import PeerClient
from vcpo_rollout.transport.peer_service import PeerService
from vcpo_rollout.transport.transfer_buffer import TransferCache
from vcpo_rollout.weights.fetcher import WeightFetcher

add_policy_service = policy_pb2_grpc.add_PolicyServiceServicer_to_server


class Sharer:
    """A worker as far as weights go: its fetcher, and the server that passes them on."""

    def __init__(self, name, channel, **times_s):
        self.name, self._times_s = name, times_s
        self.clock = ManualClock()
        self.metrics = RolloutMetrics(run="run", group="main")
        self.cache = TransferCache()
        self.server = WireServer(keys=None)
        add_policy_service(PeerService(self.cache, wait_s=0.5), self.server.grpc_server)
        self._channel = channel
        self.held = None

    async def start(self):
        self.port = await self.server.start("127.0.0.1:0", ())
        self.learner = LearnerClient(
            self._channel,
            worker_id=self.name,
            rollout_group="main",
            serving_port=self.port,
            retries=quick_retries(),
        )
        gauges = RolloutGauges(self.metrics)
        self.peers = PeerClient(
            lambda address: open_channel(address, key=None),
            worker_id=self.name,
            gauges=gauges,
            clock=self.clock,
            **self._times_s,
        )
        self.fetcher = WeightFetcher(self.learner, gauges, cache=self.cache, peers=self.peers)

    def forget_weights(self):
        self.held = None
        self.fetcher = WeightFetcher(
            self.learner, RolloutGauges(self.metrics), cache=self.cache, peers=self.peers
        )

    async def manifest(self):
        return await self.learner.newest_policy(self.held, wait_s=0)

    async def take(self, manifest=None):
        manifest = manifest or await self.manifest()
        weights = await self.fetcher.fetch(manifest)
        self.held = HeldPolicy(incarnation=INCARNATION, policy_version=weights.policy_version)
        await self.manifest()  # as a worker does: it holds this one and asks for the next
        return weights

    def num_bytes(self, source):
        labels = {"run": "run", "group": "main", "source": source}
        name = "vcpo_rollout_weight_sync_bytes_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def num_avoided(self, reason):
        labels = {"run": "run", "group": "main", "reason": reason}
        name = "vcpo_rollout_peers_avoided_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0


class Fleet:
    def __init__(self, store, service, channel):
        self.store, self.service, self._channel = store, service, channel
        self.sharers = []

    async def join(self, name, **times_s):
        sharer = Sharer(name, self._channel, **{"window_s": 60.0, **times_s})
        await sharer.start()
        self.sharers.append(sharer)
        return sharer


@contextlib.asynccontextmanager
async def a_fleet(*versions):
    store = store_of(*versions)
    service = FailingService(store)
    async with serve_services(lambda server: add_policy_service(service, server)) as channel:
        fleet = Fleet(store, service, channel)
        try:
            yield fleet
        finally:
            for sharer in fleet.sharers:
                await sharer.server.stop(0)


async def test_a_late_joiner_gets_the_newest_version_from_a_worker_that_holds_it():
    async with a_fleet(4) as fleet:
        await (await fleet.join("first")).take()
        late = await fleet.join("late")
        weights = await late.take()
        assert weights.shards[0].payload == payload_of(4)
        assert late.num_bytes("learner") == 0
        assert late.num_bytes("peer") == len(payload_of(4))


async def test_a_late_joiner_gets_the_full_set_that_another_made_from_deltas():
    async with a_fleet(4) as fleet:
        first = await fleet.join("first")
        await first.take()
        publish(fleet.store, 5)
        await first.take()
        late = await fleet.join("late")
        assert (await late.take()).shards[0].payload == payload_of(5)
        assert late.num_bytes("learner") == 0


@pytest.mark.parametrize("num_workers", [4, 16])
async def test_the_learner_sends_a_version_twice_however_many_want_it_at_once(num_workers):
    async with a_fleet(0) as fleet:
        workers = [await fleet.join(f"w{number}") for number in range(num_workers)]
        await asyncio.gather(*(worker.take() for worker in workers))
        assert fleet.service.num_bytes == 2 * len(payload_of(0))
        publish(fleet.store, 1)
        fleet.service.num_bytes = 0
        taken = await asyncio.gather(*(worker.take() for worker in workers))
        assert all(weights.shards[0].payload == payload_of(1) for weights in taken)
        assert (
            fleet.service.num_bytes == 2 * fleet.store.get_delta(INCARNATION, 1, 0).file.size_bytes
        )


async def test_what_a_dead_peer_no_longer_gives_comes_from_the_learner():
    async with a_fleet(4) as fleet:
        first = await fleet.join("first")
        await first.take()
        late = await fleet.join("late")
        manifest = await late.manifest()
        await first.server.stop(0)
        assert (await late.take(manifest)).shards[0].payload == payload_of(4)
        assert late.num_bytes("learner") == len(payload_of(4))


async def test_a_peer_that_says_nothing_is_left():
    class Silent(policy_pb2_grpc.PolicyServiceServicer):
        async def Fetch(self, request, context):  # noqa: N802 - named by the contract
            yield policy_pb2.PolicyChunk(offset=0, data=payload_of(4)[:50])
            await asyncio.Event().wait()

    server = WireServer(keys=None)
    add_policy_service(Silent(), server.grpc_server)
    port = await server.start("127.0.0.1:0", ())
    async with a_fleet(4) as fleet:
        worker = await fleet.join("worker", window_s=0.05)
        manifest = await worker.manifest()
        manifest.peer = f"127.0.0.1:{port}"
        assert (await worker.take(manifest)).shards[0].payload == payload_of(4)
        num_by_peer = worker.num_bytes("peer")
        assert num_by_peer in {0, 50}  # as fast as the two found each other
        assert fleet.service.fetches[-1].offset == num_by_peer
        assert num_by_peer + worker.num_bytes("learner") == len(payload_of(4))
    await server.stop(0)


class Dripping(policy_pb2_grpc.PolicyServiceServicer):
    """Sends a byte at a time, never silent and never done."""

    num_asked = 0

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        self.num_asked += 1
        for offset in range(request.offset, len(payload_of(4))):
            yield policy_pb2.PolicyChunk(offset=offset, data=payload_of(4)[offset : offset + 1])
            await asyncio.sleep(0.01)


class Lying(policy_pb2_grpc.PolicyServiceServicer):
    """Sends another version than it is asked for."""

    num_asked = 0

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        self.num_asked += 1
        yield policy_pb2.PolicyChunk(offset=0, data=payload_of(5))


@contextlib.asynccontextmanager
async def a_bad_peer(service):
    """Its address."""
    server = WireServer(keys=None)
    add_policy_service(service, server.grpc_server)
    port = await server.start("127.0.0.1:0", ())
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_peer_that_drips_is_left_within_a_window_and_not_asked_for_five_minutes():
    dripping = Dripping()
    async with a_fleet(4) as fleet, a_bad_peer(dripping) as address:
        joiner = await fleet.join("joiner", window_s=0.2)
        manifest = await joiner.manifest()
        manifest.peer = address
        async with asyncio.timeout(4):  # the whole version would take it 40 s
            assert (await joiner.take(manifest)).shards[0].payload == payload_of(4)
        assert 0 < joiner.num_bytes("peer") < 200
        for seconds, num_asked in ((299, 1), (1, 2)):
            joiner.clock.advance(seconds)
            joiner.forget_weights()
            await joiner.take(manifest)
            assert dripping.num_asked == num_asked
        assert joiner.num_avoided("slow") == 2


async def test_a_peer_that_is_never_slow_enough_is_left_when_the_time_of_all_peers_is_up():
    async with a_fleet(4) as fleet, a_bad_peer(Dripping()) as address:
        joiner = await fleet.join("joiner", least_fetch_s=0.2)  # a window is 60 s
        manifest = await joiner.manifest()
        manifest.peer = address
        async with asyncio.timeout(4):  # the whole version would take it 40 s
            assert (await joiner.take(manifest)).shards[0].payload == payload_of(4)
        assert joiner.num_bytes("peer") + joiner.num_bytes("learner") == len(payload_of(4))
        assert joiner.num_avoided("slow") == 1


class LeavingLate(policy_pb2_grpc.PolicyServiceServicer):
    """Breaks off after a time on a joiner's clock."""

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        self.clock.advance(self.after_s)
        yield policy_pb2.PolicyChunk(offset=0, data=payload_of(4)[:50])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it has to go")


@pytest.mark.parametrize(("after_s", "num_asked"), [(119, 1), (120, 0)])
async def test_all_peers_together_have_two_minutes_before_the_learner_is_asked(after_s, num_asked):
    late, lying = LeavingLate(), Lying()
    async with a_fleet(4) as fleet, a_bad_peer(late) as first, a_bad_peer(lying) as second:
        joiner = await fleet.join("joiner")
        late.clock, late.after_s = joiner.clock, after_s
        manifest = await joiner.manifest()
        manifest.peer = first
        manifest.other_peers.append(second)
        assert (await joiner.take(manifest)).shards[0].payload == payload_of(4)
        assert lying.num_asked == num_asked
        assert joiner.num_bytes("learner") > 0


@pytest.mark.parametrize(
    ("total_bytes", "seconds"),
    [(1, 120), (1200 << 20, 120), (28 << 30, 2867.2)],  # 28,672 MiB, 10 in a second
    ids=["small", "as large as fits", "14 billion elements of 2 bytes"],
)
async def test_a_large_version_has_the_time_that_a_slow_network_takes(total_bytes, seconds):
    async with a_fleet(4) as fleet:
        joiner = await fleet.join("joiner")
        assert joiner.peers.deadline_s(total_bytes) == joiner.clock.now_s + seconds


async def test_what_a_bad_peer_does_not_give_comes_from_another_before_the_learner():
    async with a_fleet(4) as fleet, a_bad_peer(Dripping()) as address:
        await (await fleet.join("first")).take()
        joiner = await fleet.join("joiner", window_s=0.2)
        manifest = await joiner.manifest()
        manifest.other_peers.append(manifest.peer)
        manifest.peer = address
        assert (await joiner.take(manifest)).shards[0].payload == payload_of(4)
        assert joiner.num_bytes("learner") == 0


async def test_the_learner_names_other_workers_beside_the_one_to_ask_first():
    async with a_fleet(4) as fleet:
        addresses = set()
        for name in ("first", "second"):
            await (sharer := await fleet.join(name)).take()
            addresses.add(f"127.0.0.1:{sharer.port}")
        manifest = await (await fleet.join("late")).manifest()
        assert {manifest.peer, *manifest.other_peers} == addresses


async def test_what_a_lying_peer_sent_is_refused_and_the_learner_asked():
    lying = Lying()
    async with a_fleet(4) as fleet, a_bad_peer(lying) as address:
        worker = await fleet.join("worker")
        manifest = await worker.manifest()
        manifest.peer = address
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await worker.take(manifest)
        again = await worker.manifest()
        assert again.peer == ""
        assert (await worker.take(again)).shards[0].payload == payload_of(4)


async def test_a_peer_that_lied_is_not_asked_again():
    lying = Lying()
    async with a_fleet(4) as fleet, a_bad_peer(lying) as address:
        worker = await fleet.join("worker")
        manifest = await worker.manifest()
        manifest.peer = address
        with pytest.raises(CorruptWeightsError):
            await worker.take(manifest)
        assert (await worker.take(manifest)).shards[0].payload == payload_of(4)
        assert lying.num_asked == 1
        assert worker.num_avoided("corrupt") == 1


async def test_a_peer_that_does_not_hold_a_version_is_asked_for_the_next():
    async with a_fleet(4) as fleet:
        first, late = await fleet.join("first"), await fleet.join("late")
        manifest = await late.manifest()
        manifest.peer = f"127.0.0.1:{first.port}"
        await late.take(manifest)
        await first.take()
        late.forget_weights()
        await late.take(manifest)
        assert late.num_bytes("peer") == len(payload_of(4))


async def test_a_worker_says_that_it_has_no_manifests():
    async with a_fleet(4) as fleet:
        worker = await fleet.join("worker")
        async with open_channel(f"127.0.0.1:{worker.port}", key=None) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="ask the learner"):
                await stub.GetManifest(policy_pb2.GetManifestRequest(worker_id="w"), timeout=5)


async def test_an_offset_behind_the_end_is_refused():
    async with a_fleet(4) as fleet:
        worker = await fleet.join("worker")
        await worker.take()
        async with open_channel(f"127.0.0.1:{worker.port}", key=None) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            request = policy_pb2.FetchRequest(
                worker_id="w", incarnation=INCARNATION, policy_version=4, offset=1 << 30
            )
            with pytest.raises(grpc.aio.AioRpcError, match="offset: must be less than"):
                await stub.Fetch(request, timeout=5).read()


class BreakingOff(policy_pb2_grpc.PolicyServiceServicer):
    """Passes on what another peer sends, up to a byte."""

    def __init__(self, peer, num_bytes):
        self.peer, self.num_bytes = peer, num_bytes

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        async for chunk in self.peer.Fetch(request, context):
            chunk.data = chunk.data[: self.num_bytes]
            yield chunk
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has to go")


@pytest.mark.parametrize("num_elements", [0, 4, 5, 6, 7])
async def test_a_worker_joins_from_peers_that_hold_two_later_versions(num_elements):
    """Element 4 changes with version 5 and element 5 with version 6."""
    async with a_fleet(4) as fleet:
        first, second = await fleet.join("first"), await fleet.join("second")
        await first.take()
        await second.take()
        joiner = await fleet.join("joiner")
        manifest = await joiner.manifest()
        publish(fleet.store, 5)
        await first.take()
        await second.take()
        publish(fleet.store, 6)
        await second.take()
        header_bytes = len(payload_of(4)) - 4000
        breaking = BreakingOff(PeerService(first.cache), header_bytes + 2 * num_elements)
        async with a_bad_peer(breaking) as address:
            manifest.peer = address
            manifest.other_peers[:] = [f"127.0.0.1:{second.port}"]
            assert await joiner.fetcher.fetch(manifest) is None
        assert joiner.num_bytes("peer") == len(payload_of(4))
        joiner.held = joiner.fetcher.base
        assert joiner.held.policy_version == 4
        weights = await joiner.take()
        assert weights.shards[0].payload == payload_of(6)
        assert weights.changes is None
        assert joiner.num_avoided("corrupt") == 0


async def test_a_peer_that_claims_a_version_that_does_not_exist_is_found_out_and_avoided():
    class Claiming(policy_pb2_grpc.PolicyServiceServicer):
        async def Fetch(self, request, context):  # noqa: N802 - named by the contract
            yield policy_pb2.PolicyChunk(policy_version=99, data=payload_of(4))

    async with a_fleet(4) as fleet, a_bad_peer(Claiming()) as address:
        joiner = await fleet.join("joiner")
        manifest = await joiner.manifest()
        manifest.peer = address
        assert await joiner.fetcher.fetch(manifest) is None
        publish(fleet.store, 5)
        joiner.held = joiner.fetcher.base
        with pytest.raises(CorruptWeightsError, match="says that it holds version 99, but the new"):
            await joiner.take()
        assert joiner.num_avoided("corrupt") == 1
        assert joiner.fetcher.base is None
        joiner.held = None
        assert (await joiner.take()).shards[0].payload == payload_of(5)
