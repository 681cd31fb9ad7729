"""All ways of ingestion deliver the same data, so their costs can be compared."""

import argparse
import math

import pytest

from benchmarks.learner.ingest import (
    Rate,
    make_responses,
    make_spec,
    measure,
    way_to_submit,
)


@pytest.mark.parametrize("way", ["grpc", "log", "tls", "http"])
async def test_what_arrives_is_what_was_sent(way, tmp_path):
    spec = make_spec(argparse.Namespace(prompts=2, group=2))
    responses = make_responses(4, mean_tokens=8)
    batches = []

    async with way_to_submit(way, spec, tmp_path) as (dispatcher, submit):
        next_batch = dispatcher.next_batch

        async def observed():
            batches.append(await next_batch())
            return batches[-1]

        dispatcher.next_batch = observed
        rate = Rate()
        await measure(dispatcher, submit, responses, rate, steps=2, in_flight=1)
    assert 0 < rate.cpu_s < math.inf
    assert len(rate.answers_s) == 4
    for batch in batches:
        taken = [trajectory for group in batch for trajectory in group.trajectories]
        assert [one.response_token_ids for one in taken] == [
            one.response_token_ids for one in responses
        ]
        assert [one.rollout_logprobs for one in taken] == [
            one.rollout_logprobs for one in responses
        ]
    assert len(batches) == 2
