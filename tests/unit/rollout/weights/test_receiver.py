import asyncio
import contextlib

import pytest
import safetensors.torch
import torch

from tests.fixtures.rollout.policy_versions import flip_bit, served_versions
from tests.fixtures.rollout.worker import (
    FakeEngine,
    eventually,
    quick_retries,
    receiver_of,
    serve_services,
    weights_payload,
)
from vcpo.api.workloads import Quantization
from vcpo.metrics import RolloutMetrics
from vcpo.records.reasons import WeightUpdates
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.postprocess import QuantizationAndNoise, WeightPostprocessing


class PolicyServer(policy_pb2_grpc.PolicyServiceServicer):
    """Describes the newest of its versions; each transfer meets the next of its failures."""

    def __init__(self, served):
        self._served, self.incarnation = served, "now"
        self.offer(0)
        self.failures = []
        served.failures = _Failures(self)

    def offer(self, version, *, incarnation="now", payload=None):
        if incarnation != self.incarnation or not self._served.store.newest:
            self._served.restart(incarnation)
            self.incarnation = incarnation
        payload = bytearray(payload or weights_payload(float(version)))
        self._served.store.publish(self._served.store.prepare(version, payload))
        self.newest = self._served.manifest()

    @property
    def offsets(self):
        return [offset for _, offset in self._served.requests]

    async def GetManifest(self, request, context):  # noqa: N802 - named by the contract
        held = (request.held_incarnation, request.held_policy_version)
        if request.HasField("held_policy_version"):
            while request.wait_seconds and held == (
                self.newest.incarnation,
                self.newest.policy_version,
            ):
                await asyncio.sleep(0.001)
        return self.newest


class _Failures(list):
    """The failures of the server of files, by the names that the tests give them."""

    def __init__(self, server):
        self._server = server

    def __bool__(self):
        return bool(self._server.failures)

    def pop(self, _):
        trouble = self._server.failures.pop(0)
        return flip_bit(-1, 0) if trouble == "corrupt" else lambda data: data[:100]


@contextlib.asynccontextmanager
async def follow_server(server, engine, postprocess=None, adapters=None):
    """A receiver that follows the server for as long as the context lasts."""
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    async with serve_services(lambda grpc_server: add(server, grpc_server)) as channel:
        receiver = receiver_of(
            LearnerClient(channel, worker_id="w", rollout_group="main", retries=quick_retries()),
            engine,
            RolloutGauges(RolloutMetrics(run="run", group="main")),
            postprocess=postprocess,
            adapters=adapters,
            wait_after_corruption_s=0.0,
        )
        task = asyncio.create_task(receiver.run())
        try:
            yield receiver, task
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
def server():
    with served_versions() as served:
        yield PolicyServer(served)


@pytest.fixture
def engine():
    return FakeEngine()


async def test_a_prepared_version_is_what_the_engine_gets_under_its_own_label(server, engine):
    taken = []

    async def take(weights):
        taken.append(weights)
        return 0

    engine.swap_weights = take
    rounding = WeightPostprocessing(
        transforms=[QuantizationAndNoise(quantization=Quantization.INT8, noise=None, seed=0)]
    )
    weight = torch.tensor([[1.27, 0.014]])
    server.offer(3, payload=safetensors.torch.save({"layer.weight": weight}))
    async with follow_server(server, engine, rounding) as (receiver, _):
        assert (await receiver.wait_for_other(None)).policy_version == 3
    assert [weights.policy_version for weights in taken] == [3]
    tensors = safetensors.torch.load(taken[0].payload)
    torch.testing.assert_close(tensors["layer.weight"], torch.tensor([[1.27, 0.01]]))


async def test_updates_that_took_over_sequences_under_way_are_counted(server, engine):
    async with follow_server(server, engine) as (receiver, _):
        held = await receiver.wait_for_other(None)
        engine.sampling = 3
        server.offer(1)
        held = await receiver.wait_for_other(held)
        engine.sampling = 0
        server.offer(2)
        await receiver.wait_for_other(held)
    assert receiver.weight_updates == WeightUpdates(in_flight=1)


@pytest.mark.parametrize(
    ("adapters", "counted"),
    [
        (AdapterUse.SERVED, WeightUpdates(adapter_swaps=2)),
        (AdapterUse.MERGED, WeightUpdates(merged=2)),
    ],
)
async def test_versions_of_adapters_are_counted_by_who_applies_them(
    server, engine, adapters, counted
):
    async with follow_server(server, engine, adapters=adapters) as (receiver, _):
        held = await receiver.wait_for_other(None)
        server.offer(1)
        await receiver.wait_for_other(held)
    assert receiver.weight_updates == counted


async def test_a_corrupt_version_is_thrown_away_and_fetched_again(server, engine, caplog):
    caplog.set_level("INFO")
    server.failures = ["corrupt", "corrupt"]
    async with follow_server(server, engine) as (receiver, _):
        await receiver.wait_for_other(None)
    thrown = [record for record in caplog.records if "was patched or damaged" in record.message]
    assert [record.exc_info for record in thrown] == [None, None]
    assert server.offsets == [0, 0, 0]
    assert engine.swapped == [0]


async def test_a_version_retired_meanwhile_gives_way_to_the_newest(server, engine):
    newest = server.newest
    server.offer(1)
    server.offer(2)  # which removes the files of version 0
    server.newest, later = newest, server.newest
    async with follow_server(server, engine) as (receiver, _):
        await eventually(lambda: receiver._longest_pause_s > 0.2)
        server.newest = later
        assert (await receiver.wait_for_other(None)).policy_version == 2
    assert engine.swapped == [2]


async def test_a_restarted_learner_is_followed_back_to_a_lower_version(server, engine):
    server.offer(9, incarnation="before")
    async with follow_server(server, engine) as (receiver, _):
        held = await receiver.wait_for_other(None)
        server.offer(4, incarnation="after")
        now = await receiver.wait_for_other(held)
    assert now == HeldPolicy(incarnation="after", policy_version=4)


async def test_an_engine_that_refuses_intact_weights_is_an_error(server, engine):
    async def refuse(weights):
        raise EngineError("tensor weight: unknown")

    engine.swap_weights = refuse
    async with follow_server(server, engine) as (receiver, task):
        with pytest.raises(EngineError, match="tensor weight"):
            await task
        assert receiver.held is None
