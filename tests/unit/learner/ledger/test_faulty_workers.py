"""Workers that fail where others do not: they are set aside, and the run goes on without them."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import DispatcherFixture, dispatcher_fixture, work_request
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.failures import Failure, FailureCause
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.workers import TooManyFailuresError

NO_DEVICE = Failure(cause=FailureCause.ENGINE, message="the device is gone")
NO_ANSWER = Failure(
    cause=FailureCause.REWARD, exception_type="KeyError", message="'x'", location="/app/task.py:3"
)
GROUP = 2
LIMIT = 32
"""Of `failurePolicy.maxFailuresInARow`."""


@dataclass
class SimulatedWorker:
    """A worker whose generations take some time and fail with some probability."""

    duration_s: float
    fails: float
    failure: Failure = NO_DEVICE
    places: int = 8
    """Responses that it generates at a time."""
    joins_s: float = 0.0
    is_silent: bool = False
    """Whether it calls the learner at its turns alone; others also ask for weights meanwhile."""


@dataclass
class Simulation:
    """A dispatcher and its workers; the host replaces one that is set aside, under another name."""

    workers: dict[str, SimulatedWorker]
    seed: int = 0
    fixture: DispatcherFixture = field(
        default_factory=lambda: dispatcher_fixture(
            steps=1000,
            batch={"promptsPerStep": 8, "trajectoriesPerPrompt": GROUP},
            algorithm={"maxPolicyLagSteps": 100},
            lease={"timeoutSeconds": 120},
            rollouts=[{"name": "main", "maxReplicas": 32}],
        )
    )
    failed: Counter[str] = field(default_factory=Counter)
    """Leases that each worker failed."""
    delivered: Counter[str] = field(default_factory=Counter)

    async def run(self, num_turns: int) -> None:
        """Let workers take turns, each when its generations end; the learner checks after each."""
        random_ = random.Random(self.seed)
        held: dict[str, list[Lease]] = {}
        start_s = self.fixture.clock.now_s
        turns = [(start_s + one.joins_s, name) for name, one in self.workers.items()]
        heapq.heapify(turns)
        for _ in range(num_turns):
            self.fixture.clock.now_s, name = heapq.heappop(turns)
            worker = self.workers[name]
            for other in held:
                if not self.workers[other].is_silent:
                    self.fixture.registry.record_contact(other)
            for assignment in held.pop(name, []):
                self.finish(name, worker, assignment, failed=random_.random() < worker.fails)
            self.fixture.ledger.counts().check()
            self.fixture.dispatcher.failures.check()
            if self.fixture.dispatcher.registry.set_aside_process(name) is not None:
                name = f"{name}+"
                self.workers[name] = worker
            request = work_request(worker_id=name, room=worker.places)
            held[name] = await self.fixture.dispatcher.lease(request, wait_s=0.0)
            pause_s = worker.duration_s if held[name] else max(worker.duration_s, 1.0)
            heapq.heappush(turns, (self.fixture.clock.now_s + pause_s, name))

    def finish(
        self, name: str, worker: SimulatedWorker, assignment: Lease, *, failed: bool
    ) -> None:
        if not failed:
            outcomes = self.fixture.submit(assignment, worker_id=name)
            self.delivered[name] += outcomes.count("accepted") // GROUP
        elif self.fixture.ledger.leases.get(assignment.lease_id) is not None:
            self.failed[name] += 1
            self.fixture.dispatcher.fail(name, assignment.lease_id, worker.failure)

    @property
    def set_aside(self) -> set[str]:
        events = self.fixture.events
        return {text.partition(":")[0] for kind, text in events if kind == "WorkerSetAside"}


def healthy(duration_s: float = 20.0) -> SimulatedWorker:
    return SimulatedWorker(duration_s=duration_s, fails=0.0)


def broken(duration_s: float = 0.1, **details) -> SimulatedWorker:
    return SimulatedWorker(duration_s=duration_s, fails=1.0, **details)


def fixture_of_two_workers() -> DispatcherFixture:
    """A run that starts with two workers."""
    return dispatcher_fixture(
        steps=1000,
        batch={"promptsPerStep": 8, "trajectoriesPerPrompt": GROUP},
        algorithm={"maxPolicyLagSteps": 100},
        lease={"timeoutSeconds": 120},
        rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 2}],
    )


@pytest.mark.parametrize("was_resumed", [False, True])
async def test_a_worker_that_fails_before_another_has_loaded_its_model_ends_no_run(was_resumed):
    workers = {"bad": broken(), "good": SimulatedWorker(duration_s=5.0, fails=0.0, joins_s=90.0)}
    run = Simulation(workers, fixture=fixture_of_two_workers())
    if was_resumed:
        run.fixture.dispatcher.failures.record_success()
    await run.run(400)
    assert run.delivered["good"] > 10
    assert "bad" in run.set_aside
    assert run.failed["bad"] <= LIMIT + 4


async def test_a_worker_that_never_comes_is_not_waited_for_without_end():
    run = Simulation({"bad": broken()}, fixture=fixture_of_two_workers())
    began_s = run.fixture.clock.now_s
    with pytest.raises(TooManyFailuresError, match="on 'bad'"):
        await run.run(3000)
    assert run.fixture.clock.now_s - began_s >= 600.0
    assert run.failed["bad"] <= LIMIT + 4


async def test_a_worker_that_breaks_later_costs_a_bounded_number_of_leases_and_is_set_aside():
    run = Simulation({"good": healthy(5.0), "bad": broken(joins_s=60.0)})
    await run.run(400)
    assert run.set_aside >= {"bad"}
    assert run.failed["bad"] <= LIMIT + 4
    assert "good" not in run.set_aside
    (why,) = [text for kind, text in run.fixture.events if text.startswith("bad: failing")]
    assert "generations in a row failed" in why
    assert "engine: the device is gone" in why
    assert run.fixture.dispatcher.registry.num_set_aside.keys() == {SetAsideCause.FAILING}


async def test_the_replacement_of_a_worker_gets_a_fresh_chance():
    run = Simulation({"good": healthy(5.0), "bad": broken()})
    while "bad" not in run.set_aside:
        await run.run(10)
    run.workers["bad"].fails = 0.0  # so is its replacement
    await run.run(100)
    assert run.set_aside == {"bad"}
    assert run.delivered["bad+"] > 0


@pytest.mark.parametrize(
    ("is_silent", "earliest_s", "latest_s"),
    [(True, 60.0, 65.0), (False, 120.0, 125.0)],  # a minute of silence; the time of a lease
    ids=["lost", "hung"],
)
async def test_a_worker_that_holds_its_leases_and_delivers_nothing_saves_no_run(
    is_silent, earliest_s, latest_s
):
    never = SimulatedWorker(duration_s=1e9, fails=0.0, is_silent=is_silent)
    run = Simulation({"bad": broken(), "never": never})
    with pytest.raises(TooManyFailuresError, match="generations in a row failed"):
        await run.run(1000)
    assert earliest_s <= run.fixture.clock.now_s - 1000.0 <= latest_s


async def test_an_outage_of_the_reward_server_sets_nobody_aside_when_it_ends():
    run = Simulation({name: healthy(duration_s=1.0 + number) for number, name in enumerate("abcd")})
    await run.run(60)
    for worker in run.workers.values():
        worker.fails, worker.failure = 1.0, NO_ANSWER
    await run.run(200)  # shorter than is tolerated
    failed = run.failed.total()
    assert failed >= 2 * LIMIT
    for worker in run.workers.values():
        worker.fails = 0.0
    await run.run(200)
    assert run.failed.total() == failed
    assert run.set_aside == set()
    assert run.delivered.total() >= 200


@pytest.mark.parametrize("seed", range(5))
async def test_an_environment_that_fails_half_the_time_sets_nobody_aside(seed):
    workers = {
        f"w{number}": SimulatedWorker(duration_s=1.0 + number, fails=0.5, failure=NO_ANSWER)
        for number in range(4)
    }
    run = Simulation(workers, seed=seed)
    await run.run(250)
    assert run.failed.total() >= 100
    assert run.set_aside == set()


@settings(max_examples=10, deadline=None)
@given(
    goods=st.lists(st.floats(0.5, 40.0), min_size=1, max_size=4),
    bads=st.lists(st.floats(0.01, 40.0), min_size=1, max_size=4),
    late=st.lists(st.floats(0.0, 100.0), min_size=8, max_size=8),
    seed=st.integers(0, 10**6),
)
async def test_while_one_worker_works_no_number_of_bad_ones_ends_the_run(goods, bads, late, seed):
    workers = {f"good-{number}": healthy(one) for number, one in enumerate(goods)}
    workers |= {f"bad-{number}": broken(one) for number, one in enumerate(bads)}
    workers["good-0"].joins_s = 0.0
    for (name, worker), joins_s in zip(workers.items(), late, strict=False):
        if name != "good-0":
            worker.joins_s = joins_s
    run = Simulation(workers, seed=seed)
    await run.run(300)
    # Each costs what it may fail before and after others are seen to work, and what it holds then.
    assert max(run.failed.values(), default=0) <= LIMIT + 4
    assert all(name.startswith("bad") for name in run.set_aside)


@settings(max_examples=10, deadline=None)
@given(durations=st.lists(st.floats(0.05, 40.0), min_size=1, max_size=8))
async def test_workers_that_all_fail_end_the_run_after_a_bounded_number_of_leases(durations):
    run = Simulation(
        {f"w{number}": broken(one, failure=NO_ANSWER) for number, one in enumerate(durations)}
    )
    with pytest.raises(TooManyFailuresError, match="reward: KeyError"):
        await run.run(3000)
    assert run.set_aside == set()
    assert max(run.failed.values()) <= LIMIT + 4
