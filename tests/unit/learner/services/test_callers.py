"""A worker's name is bound to its key: nobody else leases, submits or releases in its name."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from benchmarks.harness.changes import store_in_process
from tests.fixtures.learner.dispatcher import (
    INCARNATION,
    dispatcher_fixture,
    make_run,
    make_trajectory,
    settle,
    work_request,
)
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.client import open_channel
from vcpo.wire.errors import (
    InvalidMessageError,
    PermissionDeniedError,
    SetAsideError,
    set_aside_error,
)
from vcpo.wire.server import WireServer
from vcpo.wire.trajectory import trajectory_to_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, policy_pb2, policy_pb2_grpc, work_pb2
from vcpo.wire.v1.work_pb2_grpc import WorkServiceStub, add_WorkServiceServicer_to_server
from vcpo_learner.ledger.lease import Purpose
from vcpo_learner.ledger.worker_registry import WORKER_LOST_AFTER_S
from vcpo_learner.services import callers as callers_module
from vcpo_learner.services.callers import Callers
from vcpo_learner.services.control import ControlService
from vcpo_learner.services.work import PolicyService, WorkService

LEASE_S = 10.0


def call_with(identity):
    """The context of a call that shows this key, None: shows none."""
    metadata = () if identity is None else (("vcpo-worker-identity", identity),)
    return SimpleNamespace(invocation_metadata=lambda: metadata)


@pytest.fixture
def fixture():
    return dispatcher_fixture()


@pytest.fixture
def callers(fixture):
    return Callers(fixture.dispatcher)


async def lease(fixture, worker_id="w"):
    (assignment, *_) = await fixture.dispatcher.lease(work_request(worker_id=worker_id), wait_s=0.0)
    return assignment.lease_id


async def test_a_name_answers_to_the_key_of_its_first_call(fixture, callers):
    callers.admit("w", call_with("own"))
    await lease(fixture)
    callers.admit("w", call_with("own"))
    for other in ("another", "own ", "", None):
        with pytest.raises(PermissionDeniedError, match="worker_id: 'w' is the name of a worker"):
            callers.admit("w", call_with(other))
    callers.admit("v", call_with("another"))


async def test_a_lease_answers_to_its_worker_alone(fixture, callers):
    callers.admit("w", call_with("own"))
    lease_id = await lease(fixture)
    callers.admit("w", call_with("own"), lease_ids=[lease_id])
    with pytest.raises(PermissionDeniedError, match=f"lease_id: '{lease_id}' is another worker's"):
        callers.admit("v", call_with("another"), lease_ids=["ended", lease_id])
    fixture.dispatcher.release("w", [lease_id])
    callers.admit("v", call_with("another"), lease_ids=[lease_id])


async def test_a_lease_of_an_evaluation_answers_to_its_worker_alone(fixture, callers):
    evaluating = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=False))
    await settle()
    (granted,) = await fixture.dispatcher.lease(work_request(room=1), wait_s=0)
    evaluating.cancel()
    assert granted.purpose is Purpose.EVALUATION
    assert fixture.dispatcher.is_known("w")
    with pytest.raises(PermissionDeniedError, match="is another worker's"):
        callers.admit("v", call_with("another"), lease_ids=[granted.lease_id])


async def test_a_name_is_free_when_its_worker_is_lost_and_its_leases_have_ended(fixture, callers):
    callers.admit("w", call_with("own"))
    lease_id = await lease(fixture)
    fixture.clock.now_s += WORKER_LOST_AFTER_S + 1.0
    assert fixture.ledger.leases.get(lease_id)  # nobody has looked since
    with pytest.raises(PermissionDeniedError):
        callers.admit("w", call_with("another"))
    fixture.ledger.expire()
    callers.admit("w", call_with("another"))
    with pytest.raises(InvalidMessageError, match="worker_id"):
        callers.admit("", call_with("another"))


async def test_a_name_that_the_host_releases_is_free_at_once(fixture, callers):
    callers.admit("w", call_with("own"))
    await lease(fixture)
    fixture.dispatcher.release("w", ())
    callers.admit("w", call_with("another"))


async def test_names_that_are_free_again_are_forgotten_and_the_others_are_not(
    fixture, callers, monkeypatch
):
    monkeypatch.setattr(callers_module, "_FIRST_SWEEP", 8)
    callers._sweep_at = 8
    callers.admit("w", call_with("own"))
    await lease(fixture)
    for number in range(1000):
        callers.admit(f"invented-{number}", call_with("x"))
    assert len(callers._identities) <= 8
    with pytest.raises(PermissionDeniedError):
        callers.admit("w", call_with("x"))


KEYS = {CallerRole.WORKER: "worker-key", CallerRole.STEERING: "steering-key"}


class Served:
    """A learner's services behind a real server that asks for keys."""

    def __init__(self, address, guard, fixture):
        self.address, self.guard, self.fixture = address, guard, fixture

    def worker(self, identity):
        return open_channel(self.address, key="worker-key", identity=identity)

    async def refusal(self, call):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        return refused.value.code().name


@asynccontextmanager
async def served():
    fixture = dispatcher_fixture()
    callers = Callers(fixture.dispatcher)
    store = store_in_process(INCARNATION, fixture.clock)
    server = WireServer(keys=KEYS)
    work = WorkService(fixture.dispatcher, make_run().spec, callers=callers)
    add_WorkServiceServicer_to_server(work, server.grpc_server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(
        PolicyService(store, fixture.registry, callers), server.grpc_server
    )
    control = ControlService(dispatcher=fixture.dispatcher, signals=None, drain=None, event=None)
    control_pb2_grpc.add_ControlServiceServicer_to_server(control, server.grpc_server)
    port = await server.start("127.0.0.1:0", [])
    try:
        yield Served(f"127.0.0.1:{port}", server.guard, fixture)
    finally:
        await server.stop(0)


def submission(lease_id, worker_id):
    trajectory = trajectory_to_message(make_trajectory(lease_id, 0))
    return work_pb2.SubmitRequest(worker_id=worker_id, lease_id=lease_id, trajectories=[trajectory])


async def test_no_call_in_another_workers_name_reaches_the_learner_and_each_is_counted():
    async with served() as learner:
        lease_id = None
        async with learner.worker("own") as one, learner.worker("another") as other:
            request = work_pb2.LeaseRequest(
                worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
            )
            (granted,) = (await WorkServiceStub(one).Lease(request, timeout=30)).leases
            lease_id = granted.lease_id
            work, policy = WorkServiceStub(other), policy_pb2_grpc.PolicyServiceStub(other)
            manifest = policy_pb2.GetManifestRequest(worker_id="w")
            release = work_pb2.ReleaseRequest(worker_id="w")
            calls = [
                work.Lease(request, timeout=30),
                work.Submit(submission(lease_id, "w"), timeout=30),
                work.Submit(submission(lease_id, "v"), timeout=30),
                work.Release(release, timeout=30),
                work.Release(
                    work_pb2.ReleaseRequest(worker_id="v", lease_ids=[lease_id]), timeout=30
                ),
                work.Recall(work_pb2.RecallRequest(worker_id="w"), timeout=30),
                policy.GetManifest(manifest, timeout=30),
            ]
            assert {await learner.refusal(call) for call in calls} == {"PERMISSION_DENIED"}
            assert learner.guard.refusals == {"identity": len(calls)}
            assert learner.fixture.ledger.leases.get(lease_id)
            (outcome,) = (
                await WorkServiceStub(one).Submit(submission(lease_id, "w"), timeout=30)
            ).outcomes
        assert outcome == work_pb2.SUBMIT_OUTCOME_ACCEPTED


async def test_whoever_steers_releases_a_worker_that_is_gone_and_frees_its_name():
    async with served() as learner:
        async with learner.worker("own") as one:
            request = work_pb2.LeaseRequest(
                worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
            )
            await WorkServiceStub(one).Lease(request, timeout=30)
        async with open_channel(learner.address, key="steering-key") as host:
            control = control_pb2_grpc.ControlServiceStub(host)
            gone = control_pb2.ReleaseWorkerRequest(worker_id="w")
            assert (await control.ReleaseWorker(gone, timeout=30)).num_released == 1
        async with learner.worker("another") as later:
            assert (await WorkServiceStub(later).Lease(request, timeout=30)).leases


async def test_a_submission_whose_lease_has_expired_is_told_so_and_not_refused():
    async with served() as learner, learner.worker("own") as one:
        request = work_pb2.LeaseRequest(
            worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
        )
        (granted,) = (await WorkServiceStub(one).Lease(request, timeout=30)).leases
        learner.fixture.clock.now_s += LEASE_S + 1.0
        learner.fixture.ledger.expire()
        late = submission(granted.lease_id, "w")
        (outcome,) = (await WorkServiceStub(one).Submit(late, timeout=30)).outcomes
    assert outcome == work_pb2.SUBMIT_OUTCOME_LEASE_ENDED


def calls_of(channel, lease_id):
    """Each call that a worker makes in the name w."""
    work, policy = WorkServiceStub(channel), policy_pb2_grpc.PolicyServiceStub(channel)
    lease = work_pb2.LeaseRequest(
        worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
    )
    return [
        work.Lease(lease, timeout=30),
        work.Submit(submission(lease_id, "w"), timeout=30),
        work.Release(work_pb2.ReleaseRequest(worker_id="w"), timeout=30),
        work.Recall(work_pb2.RecallRequest(worker_id="w"), timeout=30),
        policy.GetManifest(policy_pb2.GetManifestRequest(worker_id="w"), timeout=30),
    ]


async def test_a_worker_that_was_set_aside_hears_the_cause_whatever_it_calls():
    async with served() as learner, learner.worker("own") as one:
        request = work_pb2.LeaseRequest(
            worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
        )
        (granted,) = (await WorkServiceStub(one).Lease(request, timeout=30)).leases
        learner.fixture.dispatcher.set_aside("w", SetAsideCause.MISMATCH, "0.4 nats a token off")
        for call in calls_of(one, granted.lease_id):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            told = set_aside_error(refused.value)
            assert refused.value.code().name == "FAILED_PRECONDITION"
            assert (told.cause, str(told)) == ("mismatch", "0.4 nats a token off")
        assert learner.fixture.registry.workers() == []
        assert learner.guard.refusals == {}


async def test_the_process_after_it_works_under_its_name_and_the_old_one_does_not():
    async with served() as learner:
        request = work_pb2.LeaseRequest(
            worker_id="w", rollout_group="main", incarnation=INCARNATION, max_trajectories=2
        )
        async with learner.worker("own") as old, learner.worker("new") as new:
            await WorkServiceStub(old).Lease(request, timeout=30)
            learner.fixture.dispatcher.set_aside("w", SetAsideCause.FAILING, "it fails")
            assert (await WorkServiceStub(new).Lease(request, timeout=30)).leases
            again = WorkServiceStub(old).Lease(request, timeout=30)
            assert await learner.refusal(again) == "PERMISSION_DENIED"


async def test_a_name_that_was_set_aside_stays_bound_to_its_key_among_many_others(
    fixture, callers, monkeypatch
):
    monkeypatch.setattr(callers_module, "_FIRST_SWEEP", 8)
    callers._sweep_at = 8
    callers.admit("w", call_with("own"))
    fixture.dispatcher.set_aside("w", SetAsideCause.FAILING, "it fails")
    for number in range(100):
        callers.admit(f"invented-{number}", call_with("x"))
    with pytest.raises(SetAsideError, match="it fails"):
        callers.admit("w", call_with("own"))
    callers.admit("w", call_with("new"))


def test_another_refusal_is_not_taken_for_the_end_of_a_worker():
    for metadata in ((), (("vcpo-set-aside", "a word of a later vcpo"),), (("other", "failing"),)):
        refusal = grpc.aio.AioRpcError(
            grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata)
        )
        assert set_aside_error(refusal) is None
