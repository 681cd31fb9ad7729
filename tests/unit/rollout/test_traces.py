"""One trajectory from its lease to the update, over real calls between learner and worker."""

from __future__ import annotations

import pytest

from tests.fixtures.rollout.worker import LearnerFixture, eventually, learner_fixture, run_in_task
from vcpo import tracing
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.traces import TrajectoryTraces
from vcpo_rollout.transport.learner_client import HeldPolicy

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
from tests.fixtures.traces import RecordedSpans, recorded_spans

STAGES = {"score": 0.5, "backward": 1.0, "optimizer": 0.25}


async def take_step(fixture: LearnerFixture) -> int:
    """Take what the training loop takes of a step; return the number of its groups."""
    groups = await fixture.dispatcher.next_batch()
    assert groups is not None
    with fixture.traces.step(groups, 0):
        fixture.traces.record_stages(STAGES)
        with fixture.traces.publication(1):
            fixture.publish(1)
    return len(groups)


async def traced_run(spans: RecordedSpans) -> int:
    """Run one step with a worker that takes over the new version; return the step's groups."""
    async with learner_fixture() as fixture:
        fixture.publish(0)
        async with run_in_task(fixture.worker()):
            num_groups = await take_step(fixture)
            await eventually(lambda: fixture.engine.swapped == [0, 1])
            await eventually(lambda: "swap" in spans.names())
    return num_groups


async def test_a_trajectory_is_one_trace_from_its_lease_to_the_buffer():
    with recorded_spans() as spans:
        await traced_run(spans)
    by_lease = {span.attributes["vcpo.lease"]: span for span in spans.named("lease.grant")}
    buffered = spans.named("buffer")
    assert buffered
    for span in buffered:
        grant = by_lease[span.attributes["vcpo.lease"]]
        assert spans.children_of(grant) == ["environment", "generate", "environment", "submit"]
        assert span.context.trace_id == grant.context.trace_id
        (submit,) = (
            each for each in spans.named("submit") if each.context.span_id == span.parent.span_id
        )
        assert submit.parent.span_id == grant.context.span_id
    assert all(grant.parent is None for grant in by_lease.values())


async def test_a_step_links_to_the_trajectories_of_its_batch():
    with recorded_spans() as spans:
        num_groups = await traced_run(spans)
    (update,) = spans.named("update")
    buffered = {span.context.span_id: span for span in spans.named("buffer")}
    linked = [buffered[link.context.span_id] for link in update.links]
    assert len(linked) == num_groups > 1
    assert update.parent is None
    assert update.context.trace_id not in {span.context.trace_id for span in linked}
    assert all(span.end_time <= update.start_time for span in linked)


async def test_a_version_is_followed_from_its_step_into_the_workers_engine():
    with recorded_spans() as spans:
        await traced_run(spans)
    (update,), (publish,) = spans.named("update"), spans.named("publish")
    assert spans.children_of(update) == ["score", "backward", "optimizer", "publish"]
    assert spans.children_of(publish) == ["fetch", "swap"]


async def test_without_tracing_a_lease_and_a_version_carry_nothing():
    async with learner_fixture() as fixture:
        fixture.publish(0)
        client = fixture.client()
        manifest = await client.newest_policy(None, wait_s=0.0)
        held = HeldPolicy.from_manifest(manifest)
        result = await client.lease(held=held, max_trajectories=4, wait_s=0.0)
        assert {lease.traceparent for lease in result.leases} == {""}
        assert manifest.traceparent == ""


def open_lease(number: int) -> Lease:
    return Lease(
        lease_id=f"lease-{number}",
        worker_id="w",
        grant_number=number,
        group_number=number,
        prompt_index=0,
        response_numbers=(0, 1),
        policy_version=0,
        expires_s=0.0,
    )


def test_one_lease_in_a_hundred_is_traced_from_the_first_on():
    with recorded_spans() as spans:
        traces = TrajectoryTraces()
        given = [traces.grant(open_lease(number)) for number in range(201)]
    assert [number for number, each in enumerate(given) if each] == [0, 100, 200]
    assert len(spans.named("lease.grant")) == 3


def test_a_step_without_a_traced_trajectory_is_not_traced():
    with recorded_spans() as spans:
        traces = TrajectoryTraces()
        with traces.step([], 0):
            traces.record_stages(STAGES)
            with traces.publication(1):
                assert tracing.traceparent() == ""
    assert spans.names() == set()


def test_groups_that_the_buffer_drops_make_room():
    with recorded_spans() as spans:
        traces = TrajectoryTraces(one_lease_in=1)
        for number in range(300):
            traces.accept(f"lease-{number}", traces.grant(open_lease(number)))
    assert len(spans.named("buffer")) == 300 - 256
