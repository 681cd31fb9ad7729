"""From the learner's parameters to a generating engine's, over the wire, by deltas."""

import asyncio

import torch

from tests.fixtures.rollout.models import build_model, request_for
from tests.fixtures.rollout.worker import learner_fixture, receiver_of
from vcpo.api.workloads import Precision
from vcpo_learner.model.published_state import PublishedState
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.gauges import RolloutGauges

ENDLESS = 1 << 16


def bits(model):
    return {name: one.bfloat16().view(torch.int16) for name, one in model.named_parameters()}


async def test_an_engine_that_got_deltas_holds_the_learners_bits():
    learners, workers = build_model(seed=1, tied=True), build_model(seed=2, tied=True)
    engine = HfEngine(
        workers,
        end_token_ids=frozenset(),
        pad_token_id=0,
        max_concurrent_sequences=1,
        seed=0,
        precision=Precision.BFLOAT16,
    )
    parameters = PublishedState(learners)
    async with learner_fixture() as fixture:

        def publish(version):
            weights = parameters.take(Precision.BFLOAT16)
            fixture.store.publish(fixture.store.prepare(version, weights))
            return len(fixture.store.content)

        full_bytes = publish(0)
        receiver = receiver_of(fixture.client(), engine, RolloutGauges(fixture.metrics))
        following = asyncio.create_task(receiver.run())
        held = await receiver.wait_for_other(None)
        generating = asyncio.create_task(
            engine.generate(request_for((1, 2), max_new_tokens=ENDLESS))
        )
        for version in (1, 2, 3):
            with torch.no_grad():
                learners.lm_head.weight[version] += 0.5  # embedding and head are one
                learners.model.norm.weight[version] = -0.0
            publish(version)
            held = await receiver.wait_for_other(held)
        following.cancel()
        generating.cancel()
        await asyncio.wait([following, generating])
        assert len(fixture.store.newest.manifest.deltas) == 3
    await engine.close()
    assert engine.policy_version == 3
    assert all(torch.equal(bits(workers)[name], one) for name, one in bits(learners).items())
    received = fixture.metrics.registry.get_sample_value(
        "vcpo_rollout_weight_sync_bytes_total",
        {"run": "run", "group": "main", "source": "store"},
    )
    assert received < 1.2 * full_bytes
