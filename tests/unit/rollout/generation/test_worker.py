import asyncio

import pytest
import pytest_asyncio

from tests.fixtures.rollout.worker import (
    ManualTime,
    counts,
    eventually,
    learner_fixture,
    run_in_task,
)
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.errors import SetAsideError
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import PartialResponse, VersionSpan, prompt_checksum
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.transport.learner_client import HeldPolicy, LeaseResult


@pytest_asyncio.fixture
async def fixture():
    async with learner_fixture() as fixture:
        yield fixture


async def shut_down_at_work(fixture, is_at_work):
    """Shut down a worker of two places that may not complete what it has begun."""
    fixture.engine.gate.clear()
    fixture.publish(0)
    worker = fixture.worker(places=2, drain_s=0.01)
    async with run_in_task(worker) as task:
        await eventually(is_at_work)
        worker.shut_down()
        await task


async def test_responses_are_generated_judged_and_submitted(fixture):
    fixture.publish(0)
    async with run_in_task(fixture.worker()):
        # The worker counts a submission once it has the learner's reply.
        await eventually(lambda: fixture.samples("accepted") == 8)
    first, _ = fixture.ledger.take_batch(step=0, max_policy_lag_steps=0)
    (one, two) = first.trajectories
    assert [one.trajectory_id, two.trajectory_id] == ["train-now-0/0", "train-now-0/1"]
    assert (one.prompt_token_ids, one.response_token_ids) == ((3, 4), (5, 1))
    assert (one.rollout_logprobs, one.reward) == ((-0.5, -0.25), 0.75)


async def test_no_prompt_is_leased_before_the_first_policy(fixture):
    asked = asyncio.Event()
    newest = fixture.store.wait_for_newest

    async def wait_for_newest(**request):
        asked.set()
        return await newest(**request)

    fixture.store.wait_for_newest = wait_for_newest
    async with run_in_task(fixture.worker()):
        await asked.wait()
        assert fixture.dispatcher.registry.workers() == []
        fixture.publish(0)
        await eventually(lambda: counts(fixture).leased > 0)


async def test_a_failed_generation_is_a_typed_failure_and_no_response(fixture):
    fixture.engine.failures = [EngineError("out of memory")] * 2
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=2)):
        await eventually(lambda: counts(fixture).buffered == 8)
    assert counts(fixture).dropped == {"generation_failed": 2}
    assert fixture.samples("engine_failed") == 2


async def test_responses_that_the_learner_refuses_are_a_typed_failure(fixture):
    fixture.engine.label_offset = 7  # tokens of a version that does not exist
    fixture.publish(0)
    async with run_in_task(fixture.worker()):
        await eventually(lambda: counts(fixture).dropped.get("generation_failed", 0) >= 4)
    assert counts(fixture).buffered == 0


async def test_when_one_of_a_group_fails_the_others_stop(fixture):
    fixture.engine.failures = [EngineError("one of two")]
    fixture.engine.gate.clear()
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=2)):
        await eventually(lambda: counts(fixture).dropped == {"generation_failed": 2})
        await eventually(lambda: fixture.engine.sampling >= 2)
        assert fixture.engine.sampling == 2  # the next group's, and no third


async def test_an_engine_without_responses_ends_the_worker():
    async with learner_fixture(algorithm={"maxPolicyLagSteps": 100}, steps=100) as fixture:
        fixture.engine.failures = [EngineError("the device is gone") for _ in range(1000)]
        fixture.publish(0)
        async with run_in_task(fixture.worker()) as task:
            with pytest.raises(EngineError, match="the device is gone"):
                await task
        assert counts(fixture).in_flight == 0


async def test_a_failure_now_and_then_does_not(fixture):
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=2)) as task:
        for failed in range(1, 11):
            await eventually(lambda: counts(fixture).buffered == 8)
            fixture.engine.failures = [EngineError("now and then")]
            fixture.ledger.take_batch(step=0, max_policy_lag_steps=-1)  # all too old
            drops = {"lag_exceeded": 8 * failed, "generation_failed": 2 * failed}
            fixture.dispatcher.notify()
            await eventually(lambda drops=drops: counts(fixture).dropped == drops)
        assert not task.done()


async def test_a_worker_asks_only_with_room_for_a_group(fixture):
    fixture.engine.gate.clear()
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=3)):
        await eventually(lambda: fixture.engine.sampling == 2)
        assert counts(fixture).in_flight == 2
        fixture.engine.gate.set()
        await eventually(lambda: counts(fixture).buffered == 8)


async def test_a_worker_that_shuts_down_completes_its_responses(fixture):
    fixture.engine.gate.clear()
    fixture.publish(0)
    worker = fixture.worker()
    async with run_in_task(worker) as task:
        await eventually(lambda: fixture.engine.sampling == 4)
        worker.shut_down()
        fixture.engine.gate.set()
        assert await task is RunPhase.RUNNING
    assert (counts(fixture).buffered, counts(fixture).in_flight) == (4, 0)
    assert fixture.dispatcher.registry.workers() == []


async def test_a_worker_that_shuts_down_releases_what_it_cannot_complete_in_time(fixture):
    await shut_down_at_work(fixture, lambda: fixture.engine.sampling == 2)
    assert counts(fixture).dropped == {"released": 2}
    assert fixture.samples("released") == 2
    assert fixture.engine.sampling == 0


async def test_another_worker_resumes_the_responses_of_a_worker_that_shut_down(fixture):
    fixture.engine.quick = 1
    await shut_down_at_work(fixture, lambda: len(fixture.engine.requests) == 2)
    assert counts(fixture).dropped == {"released": 2}
    # Two responses, one complete ("5, end") and one interrupted at its first token.

    fixture.engine.requests.clear()
    fixture.engine.gate.set()
    fixture.publish(1)
    async with run_in_task(fixture.worker(places=2, learner=fixture.client_for("another"))):
        await eventually(lambda: counts(fixture).buffered >= 4)
    # One of the two was complete: it was judged, and nothing sampled for it.
    (resumed, *_) = fixture.engine.requests
    assert resumed.partial_response == PartialResponse(
        token_ids=(5,),
        logprobs=(-0.5,),
        version_spans=(VersionSpan(policy_version=0, num_tokens=1),),
        prompt_xxh3=prompt_checksum((3, 4)),
        number=1,
    )
    assert sum(request.partial_response is not None for request in fixture.engine.requests) == 1
    group, *_ = fixture.ledger.take_batch(step=1, max_policy_lag_steps=1)
    assert {one.response_token_ids for one in group.trajectories} == {(5, 1)}
    versions = {
        tuple(span.policy_version for span in one.version_spans) for one in group.trajectories
    }
    assert versions == {(0, 0), (0, 1)}
    assert {one.reward for one in group.trajectories} == {0.75}


async def test_an_environment_that_says_another_prompt_elsewhere_mixes_no_group(fixture):
    await shut_down_at_work(fixture, lambda: fixture.engine.sampling == 2)
    fixture.engine.requests.clear()
    fixture.engine.gate.set()
    fixture.codec.encode = lambda _: (3, 4, 4)
    async with run_in_task(fixture.worker(places=2, learner=fixture.client_for("another"))):
        await eventually(lambda: counts(fixture).buffered == 8)
    # The partial response to (3, 4) failed there, and its prompt got a new response.
    assert counts(fixture).dropped == {"released": 2, "generation_failed": 2}
    groups = fixture.ledger.take_batch(step=0, max_policy_lag_steps=1)
    prompts = {one.prompt_token_ids for group in groups for one in group.trajectories}
    assert prompts == {(3, 4, 4)}


async def test_the_responses_of_an_evaluation_restart(fixture):
    evaluating = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
    await shut_down_at_work(fixture, lambda: fixture.engine.sampling == 1)
    fixture.engine.gate.set()
    async with run_in_task(fixture.worker(places=2, learner=fixture.client_for("another"))):
        assert (await evaluating).record.num_trajectories == 1
    assert [request.partial_response for request in fixture.engine.requests[:2]] == [None, None]


async def test_a_worker_ends_when_the_run_is_complete(fixture):
    fixture.publish(0)
    async with run_in_task(fixture.worker()) as task:
        await eventually(lambda: counts(fixture).buffered == 8)
        fixture.dispatcher.complete()
        assert await task is RunPhase.COMPLETE


async def test_responses_in_progress_are_submitted_while_the_run_drains(fixture):
    fixture.engine.gate.clear()
    fixture.publish(0)
    async with run_in_task(fixture.worker()) as task:
        await eventually(lambda: fixture.engine.sampling == 4)
        fixture.dispatcher.drain()
        fixture.engine.gate.set()
        assert await task is RunPhase.DRAINING
    assert counts(fixture).buffered == 4


async def test_a_preempted_response_is_interrupted_and_resumed_after_the_step():
    batch = {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "overProvisionRatio": 2.0}
    async with learner_fixture(batch=batch) as fixture:
        fixture.engine.gate.clear()
        fixture.engine.quick = 6
        fixture.publish(0)
        async with run_in_task(fixture.worker(places=12)):
            await eventually(lambda: counts(fixture).buffered == 6)
            assert await fixture.dispatcher.next_batch()
            fixture.publish(1)
            await eventually(lambda: counts(fixture).dropped == {"surplus": 2})
            await eventually(lambda: any(one.partial_response for one in fixture.engine.requests))
            assert sum(one.partial_response is not None for one in fixture.engine.requests) == 2


class OneLease:
    """A learner that has one prompt, for an instant only."""

    def __init__(self):
        self.given = False
        self.reports = []

    async def newest_policy(self, held, *, wait_s):
        await asyncio.Event().wait()

    async def lease(self, *, held, **request):
        lease = work_pb2.Lease(
            lease_id="l", split=work_pb2.SPLIT_TRAIN, num_trajectories=2, timeout_seconds=0.01
        )
        leases = () if self.given else (lease,)
        self.given = True
        return LeaseResult(leases=leases, phase=RunPhase.RUNNING, retry_after_s=60)

    async def submit(self, *_):
        self.reports.append("submitted")

    async def report_failure(self, *_):
        self.reports.append("failed")

    async def release_all(self):
        self.reports.append("released")


async def test_a_response_that_cannot_be_interrupted_is_discarded_with_its_lease(fixture):
    fixture.engine.gate.clear()
    fixture.engine.heeds_cuts = False
    learner = OneLease()
    worker = fixture.worker(learner=learner)
    worker.receiver.held = HeldPolicy(incarnation="now", policy_version=0)
    async with run_in_task(worker):
        await eventually(lambda: fixture.samples("lease_ended") == 2)
        await eventually(lambda: fixture.engine.sampling == 0)
    assert learner.reports == ["released"]


async def test_a_worker_that_is_set_aside_at_work_ends_with_the_cause(fixture, caplog):
    fixture.publish(0)
    fixture.engine.gate.clear()
    worker = fixture.worker()
    async with run_in_task(worker) as task:
        await eventually(lambda: fixture.engine.sampling == 4)
        fixture.dispatcher.set_aside("w", SetAsideCause.MISMATCH, "0.4 nats a token off")
        fixture.engine.gate.set()
        with pytest.raises(SetAsideError, match=r"0\.4 nats a token off"):
            await task
    assert counts(fixture).buffered == 0
    assert counts(fixture).dropped == {"worker_set_aside": 4}
    assert "could neither finish" not in caplog.text


# Leases of `make_run` last 10 s, of which the last second is for handing back.


async def test_sampled_tokens_are_resumed_after_the_lease_expired():
    async with learner_fixture() as fixture:
        time = ManualTime(fixture.clock)
        fixture.engine.gate.clear()
        fixture.publish(0)
        async with run_in_task(fixture.worker(places=2, time=time)):
            await eventually(lambda: fixture.engine.sampling == 2)
            time.advance(8.9)
            assert fixture.ledger.counts().dropped == {}
            time.advance(0.1)
            await eventually(lambda: len(fixture.engine.requests) == 4)
        assert fixture.ledger.expire() == []
    before, after = fixture.engine.requests[:2], fixture.engine.requests[2:]
    assert [request.partial_response for request in before] == [None, None]
    assert [request.partial_response.token_ids for request in after] == [(5,), (5,)]


async def test_the_responses_of_an_evaluation_have_all_of_their_time():
    async with learner_fixture() as fixture:
        time = ManualTime(fixture.clock)
        fixture.engine.gate.clear()
        fixture.publish(0)
        evaluating = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
        async with run_in_task(fixture.worker(places=2, time=time)):
            await eventually(lambda: fixture.engine.sampling == 1)
            time.advance(9.5)
            fixture.engine.gate.set()
            assert (await evaluating).record.num_trajectories == 1
    assert len(fixture.engine.requests) == 1
