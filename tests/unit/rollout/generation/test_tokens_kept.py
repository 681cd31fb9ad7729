"""Every token of two workers, whose leases expire and are granted again, is counted once.

Workers, client, service and ledger are the real ones, in one event loop without a network. The
engines give each token an id of its own. They sample, and the clock advances, only when the test
says so.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    INCARNATION,
    DispatcherFixture,
    dispatcher_fixture,
    make_run,
    settle,
)
from tests.fixtures.rollout.worker import FakeCodec, FakeEnvironment, ManualTime
from vcpo.metrics import RolloutMetrics
from vcpo.records.reasons import WeightUpdates
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_learner.services.work import WorkService
from vcpo_rollout.engines.engine import Generation, GenerationInterruptedError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import EnvironmentThreads
from vcpo_rollout.generation.responses import ResponseGenerator
from vcpo_rollout.generation.worker import Worker
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient

SECTIONS = {
    "steps": 1000,
    "algorithm": {"maxPolicyLagSteps": 1000},
    "lease": {"timeoutSeconds": 10},
    "sampling": {"maxNewTokens": 12},
}


class CallsAtOnce(EnvironmentThreads):
    """Calls without threads, which would make the order of events an accident."""

    async def call(self, function):
        return function()


class DirectChannel:
    """Calls of the work service without a network."""

    def __init__(self, service: WorkService) -> None:
        self._service = service
        self._context = SimpleNamespace(invocation_metadata=tuple)

    def unary_unary(self, path: str, **_):
        method = getattr(self._service, path.rpartition("/")[2], None)
        return lambda request, **_: method(request, self._context)

    def unary_stream(self, path: str, **_):
        return None


class HeldAlready:
    """A receiver that has its version."""

    held = HeldPolicy(incarnation=INCARNATION, policy_version=0)
    weight_updates = WeightUpdates()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def wait_for_other(self, held: HeldPolicy | None) -> HeldPolicy:
        return self.held


class UnderWay:
    def __init__(self, token_ids: Sequence[int], most: int) -> None:
        self.token_ids = list(token_ids)
        self.most = most
        self.ended = asyncio.Event()

    def sample(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.finish_reason is not None:
            self.ended.set()

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] % 5 == 0:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.most else None

    @property
    def parts(self) -> dict:
        size = len(self.token_ids)
        return {
            "token_ids": tuple(self.token_ids),
            "logprobs": (-0.5,) * size,
            "version_spans": (VersionSpan(policy_version=0, num_tokens=size),),
        }


class NumberingEngine:
    """Each token that is sampled is the next number."""

    end_token_ids = frozenset()
    stop_strings = None
    policy_version = 0

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self.running: list[UnderWay] = []

    def step(self) -> None:
        for sequence in [one for one in self.running if not one.ended.is_set()]:
            sequence.sample(next(self._numbers))

    async def generate(self, request, *, interrupt):
        sequence = UnderWay(
            request.partial_response.token_ids if request.partial_response else (),
            request.max_new_tokens,
        )
        self.running.append(sequence)
        waits = [asyncio.create_task(event.wait()) for event in (sequence.ended, interrupt)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.running.remove(sequence)
            for wait in waits:
                wait.cancel()
        if sequence.ended.is_set():
            return Generation(**sequence.parts, finish_reason=sequence.finish_reason)
        raise GenerationInterruptedError(
            PartialResponse(**sequence.parts) if sequence.token_ids else None
        )


class TwoWorkers(DispatcherFixture):
    """A learner with two workers, and what has become of the tokens."""

    def __init__(self) -> None:
        super().__init__(**vars(dispatcher_fixture(**SECTIONS)))
        self.time = ManualTime(self.clock)
        self.consumed: list[int] = []
        self._numbers = count(1)
        self.engines = [NumberingEngine(self._numbers) for _ in range(2)]
        service = WorkService(self.dispatcher, make_run(**SECTIONS).spec)
        self._workers = [
            self._worker(name, engine, service)
            for name, engine in zip("ab", self.engines, strict=True)
        ]
        self._tasks = [asyncio.create_task(worker.run()) for worker in self._workers]

    def _worker(self, name: str, engine: NumberingEngine, service: WorkService) -> Worker:
        gauges = RolloutGauges(RolloutMetrics(run="run", group="main"))
        return Worker(
            learner=LearnerClient(DirectChannel(service), worker_id=name, rollout_group="main"),
            receiver=HeldAlready(),
            responses=ResponseGenerator(
                engine=engine,
                environment=FakeEnvironment(),
                codec=FakeCodec(),
                gauges=gauges,
                threads=CallsAtOnce(4, gauges=gauges),
            ),
            gauges=gauges,
            max_concurrent_sequences=4,
            sequences_per_prompt=2,
            drain_s=0,
            sleep=self.time.sleep,
        )

    async def act(self, action: str | float) -> None:
        if action == "train":
            self._train()
        elif action in ("a", "b"):
            self.engines["ab".index(action)].step()
        else:
            self.time.advance(action)
        await settle()

    def expire(self) -> int:
        """What the learner does at every request."""
        num_expired = len(self.ledger.expire())
        self.dispatcher.notify()
        return num_expired

    async def close(self) -> None:
        for worker in self._workers:
            worker.shut_down()
        await asyncio.gather(*self._tasks)

    @property
    def num_sampled(self) -> int:
        return next(self._numbers) - 1

    def tokens_kept(self) -> list[int]:
        """Tokens at the learner: consumed, buffered and requeued."""
        contents = self.ledger
        groups = contents.buffer.groups()
        kept = [one.response_token_ids for group in groups for one in group.trajectories]
        waiting = [*contents.requeued, *contents.leases.all()]
        kept += [one.token_ids for prompt in waiting for one in prompt.partial_responses]
        return self.consumed + [token for token_ids in kept for token in token_ids]

    def tokens_under_way(self) -> list[int]:
        running = [one for engine in self.engines for one in engine.running]
        return [token for sequence in running for token in sequence.token_ids]

    def _train(self) -> None:
        for group in self.ledger.take_batch(step=0, max_policy_lag_steps=1000) or []:
            for one in group.trajectories:
                self.consumed.extend(one.response_token_ids)


def play_all(actions: Sequence[str | float], *, learner_first: bool) -> TwoWorkers:
    return asyncio.run(play(actions, learner_first=learner_first))


async def play(actions: Sequence[str | float], *, learner_first: bool) -> TwoWorkers:
    """Go through the actions; `learner_first`: it sees that leases have expired before the workers
    see that they are about to."""
    workers = TwoWorkers()
    await settle()
    for action in actions:
        if learner_first and isinstance(action, float):
            workers.clock.advance(action)
            workers.expire()
            await workers.act(0.0)
        else:
            await workers.act(action)
        assert workers.expire() == 0 or learner_first
        await settle()
        under_way = workers.tokens_under_way()
        assert len(under_way) == len(set(under_way)) or learner_first
        workers.ledger.counts().check()
    await workers.close()
    return workers


ACTS = st.sampled_from(["a", "b", "a", "b", "train"])


@settings(max_examples=60)
@given(st.lists(ACTS | st.sampled_from([0.5, 1.0]), min_size=20, max_size=60))
def test_no_token_is_lost_counted_twice_or_sampled_on_by_two_workers(actions):
    workers = play_all(actions, learner_first=False)
    assert sorted(workers.tokens_kept()) == list(range(1, workers.num_sampled + 1))


@settings(max_examples=60)
@given(st.lists(ACTS | st.sampled_from([0.5, 4.0, 10.0]), min_size=20, max_size=60))
def test_no_token_is_counted_twice_when_workers_are_late(actions):
    workers = play_all(actions, learner_first=True)
    kept = workers.tokens_kept()
    assert len(kept) == len(set(kept))


def test_a_lease_that_expires_again_and_again_is_completed_in_the_end():
    # Two tokens in each lease, of responses with five.
    actions = ["a", "b", 0.5, 0.5, *[1.0] * 8] * 3
    workers = play_all(actions, learner_first=False)
    dropped = workers.ledger.counts().dropped
    assert dropped.get("released", 0) > 0
    assert "lease_expired" not in dropped
    assert workers.ledger.counts().buffered > 0
