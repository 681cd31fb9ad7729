"""The learner's services over a real channel: what they refuse and what they return."""

from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest
import pytest_asyncio
import torch

from tests.fixtures.learner.dispatcher import (
    INCARNATION,
    dispatcher_fixture,
    make_partial_response,
    make_run,
    make_trajectory,
)
from tests.fixtures.learner.models import gpt2, llama
from tests.fixtures.rollout.worker import learner_fixture, serve_services
from vcpo.learner_control import LearnerControl
from vcpo.local.models import context_tokens
from vcpo.records.reasons import SetAsideCause
from vcpo.service.vocabulary import num_tokens
from vcpo.wire.errors import InvalidMessageError, set_aside_error
from vcpo.wire.packing import ExpertRoutes, RouterLayout, pack_logprobs, pack_token_ids
from vcpo.wire.trajectory import VersionSpan, trajectory_to_message
from vcpo.wire.v1 import control_pb2_grpc, policy_pb2, policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo_learner.services.work import ControlService, ResponseBounds, WorkService


@pytest_asyncio.fixture
async def fixture():
    async with learner_fixture() as fixture:
        fixture.publish(0)
        yield fixture


def lease_request(**changes):
    values = {
        "worker_id": "w",
        "process_id": "p",
        "rollout_group": "main",
        "incarnation": INCARNATION,
        "max_trajectories": 2,
    }
    return work_pb2.LeaseRequest(**{**values, **changes})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"rollout_group": "x" * 257}, "rollout_group"),
        ({"max_trajectories": 0}, "max_trajectories"),
        ({"max_trajectories": 65_537}, "max_trajectories"),
        ({"wait_seconds": -1.0}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
async def test_a_malformed_request_for_work_names_the_field(fixture, change, field):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Lease(lease_request(**change), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must be")


async def test_a_lease_says_what_to_sample_and_how(fixture):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    (lease,) = (await stub.Lease(lease_request(), timeout=5)).leases
    assert (lease.split, lease.prompt_index) == (work_pb2.SPLIT_TRAIN, 0)
    assert (lease.num_trajectories, lease.timeout_seconds) == (2, 10.0)
    assert (lease.sampling.temperature, lease.sampling.max_new_tokens) == (1.0, 1024)


async def test_preempted_leases_are_named_with_each_submission_and_with_the_version(fixture):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    kept, other = (await stub.Lease(lease_request(max_trajectories=4), timeout=5)).leases
    fixture.ledger.preempt(2)
    (preempted,) = fixture.ledger.preempted_leases("w")
    submitted = kept.lease_id if preempted == other.lease_id else other.lease_id
    trajectory = trajectory_to_message(make_trajectory(submitted, 0))
    request = work_pb2.SubmitRequest(worker_id="w", lease_id=submitted, trajectories=[trajectory])
    assert (await stub.Submit(request, timeout=5)).preempted_lease_ids == [preempted]
    policies = policy_pb2_grpc.PolicyServiceStub(fixture.channel)
    for worker_id, named in (("w", [preempted]), ("another", [])):
        manifest = await policies.GetManifest(
            policy_pb2.GetManifestRequest(worker_id=worker_id), timeout=5
        )
        assert manifest.preempted_lease_ids == named


async def test_a_reply_without_leases_says_when_to_ask_again(fixture):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    response = await stub.Lease(lease_request(max_trajectories=1), timeout=5)
    assert not response.leases
    assert response.retry_after_seconds > 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (work_pb2.SubmitRequest(worker_id="w", lease_id="l"), "trajectories"),
        (
            work_pb2.SubmitRequest(
                worker_id="w", lease_id="l", trajectories=[work_pb2.Trajectory()]
            ),
            "trajectories[0].trajectory_id",
        ),
    ],
    ids=["nothing", "empty trajectory"],
)
async def test_a_malformed_submission_names_the_field(fixture, request_, field):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Submit(request_, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must be")


@pytest_asyncio.fixture
async def small_model():
    """A stub of a learner whose model has 9 tokens and a context of 6, and a lease from it."""
    fixture = dispatcher_fixture()
    bounds = ResponseBounds(
        vocabulary_size=9, max_new_tokens=4, context_tokens=6, max_absolute_reward=10.0
    )
    work = WorkService(fixture.dispatcher, make_run().spec, bounds)
    async with serve_services(
        lambda server: work_pb2_grpc.add_WorkServiceServicer_to_server(work, server)
    ) as channel:
        stub = work_pb2_grpc.WorkServiceStub(channel)
        (lease,) = (await stub.Lease(lease_request(), timeout=5)).leases
        yield stub, lease


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"response_token_ids": (4_000_000_000,)}, "trajectories[1].response_token_ids[0]"),
        ({"rollout_logprobs": (0.5,)}, "trajectories[1].rollout_logprobs[0]"),
        (
            {"version_spans": (VersionSpan(policy_version=1, num_tokens=1),)},
            "trajectories[1].version_spans",
        ),
        ({"prompt_token_ids": (4, 3)}, "trajectories[1].prompt_token_ids"),
    ],
    ids=["beyond the vocabulary", "probability above 1", "version to come", "another prompt"],
)
async def test_one_invalid_response_refuses_its_group_and_nothing_of_the_group_is_kept(
    small_model, change, field
):
    stub, lease = small_model
    good = make_trajectory(lease.lease_id, 0)
    bad = replace(make_trajectory(lease.lease_id, 1), **change)
    request = work_pb2.SubmitRequest(
        worker_id="w",
        lease_id=lease.lease_id,
        trajectories=[trajectory_to_message(one) for one in (good, bad)],
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Submit(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must be")
    request.trajectories[1].CopyFrom(trajectory_to_message(make_trajectory(lease.lease_id, 1)))
    accepted = [work_pb2.SUBMIT_OUTCOME_ACCEPTED] * 2
    assert (await stub.Submit(request, timeout=5)).outcomes == accepted


async def test_a_released_response_is_checked_like_a_submitted_one(small_model):
    stub, lease = small_model
    strange = partial_message(1)
    strange.token_ids = pack_token_ids([9])
    request = work_pb2.ReleaseRequest(worker_id="w", lease_ids=[lease.lease_id], begun=[strange])
    with pytest.raises(grpc.aio.AioRpcError, match=r"begun\[0\]\.token_ids\[0\]: must be 0 to 8"):
        await stub.Release(request, timeout=5)


def partial_message(num_tokens, **changes):
    return work_pb2.PartialResponse(
        token_ids=pack_token_ids([5] * num_tokens),
        logprobs=pack_logprobs([-0.5] * num_tokens),
        version_spans=[work_pb2.VersionSpan(num_tokens=num_tokens)],
        **changes,
    )


async def test_a_lease_carries_the_partial_responses_released_with_its_prompt(fixture):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    (lease,) = (await stub.Lease(lease_request(), timeout=5)).leases
    partial = [
        partial_message(3, number=0),
        partial_message(1024, finish_reason=work_pb2.FINISH_REASON_LENGTH, number=1),
    ]
    release = work_pb2.ReleaseRequest(worker_id="w", lease_ids=[lease.lease_id], begun=partial)
    assert (await stub.Release(release, timeout=5)).num_released == 1
    (again,) = (await stub.Lease(lease_request(worker_id="another"), timeout=5)).leases
    assert again.prompt_index == lease.prompt_index
    assert list(again.begun) == partial


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lease_ids": []}, "lease_ids: must be the one lease"),
        ({"lease_ids": ["one", "two"]}, "lease_ids: must be the one lease"),
        ({"begun": [work_pb2.PartialResponse()]}, "begun[0].token_ids: must be 1 to"),
        (
            {"begun": [partial_message(1, prompt_xxh3=7), partial_message(1, prompt_xxh3=8)]},
            "begun[1].prompt_xxh3: must be that of begun[0]",
        ),
    ],
    ids=["no lease", "two leases", "empty", "two prompts"],
)
async def test_partial_responses_that_cannot_be_resumed_are_refused(fixture, change, problem):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    fields = {"worker_id": "w", "lease_ids": ["one"], "begun": [partial_message(1)]}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Release(work_pb2.ReleaseRequest(**{**fields, **change}), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(problem)


async def test_a_process_that_was_set_aside_hears_the_cause_and_the_next_one_works(fixture):
    stub = work_pb2_grpc.WorkServiceStub(fixture.channel)
    await stub.Lease(lease_request(), timeout=5)
    fixture.dispatcher.set_aside("w", SetAsideCause.MISMATCH, "0.4 nats a token off")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Lease(lease_request(), timeout=5)
    told = set_aside_error(refused.value)
    assert refused.value.code().name == "FAILED_PRECONDITION"
    assert (told.cause, str(told)) == ("mismatch", "0.4 nats a token off")
    assert (await stub.Lease(lease_request(process_id="later"), timeout=5)).leases


async def test_a_limit_that_changes_is_an_event_with_its_reason():
    fixture, events = dispatcher_fixture(algorithm={"maxPolicyLagSteps": 8}), []
    service = ControlService(
        dispatcher=fixture.dispatcher,
        signals=fixture.signal_window(),
        drain=lambda reason: None,
        event=lambda *event: events.append(event),
    )
    async with serve_services(
        lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
    ) as channel:
        control = LearnerControl(channel)
        await control.throttle(4, "because")
        await control.throttle(4, "because")
        await control.throttle(99, "")
        await control.throttle(12, "the bound of the spec is 8")
        assert (await control.poll()).lag_limit_steps == 8
    assert events == [
        ("Throttled", "Lag limit 8 -> 4 versions: because."),
        ("Relaxed", "Lag limit 4 -> 8 versions."),
    ]


BOUNDS = ResponseBounds(
    vocabulary_size=23, max_new_tokens=6, context_tokens=7, max_absolute_reward=10.0
)
ROUTERS = RouterLayout(num_layers=2, num_choices=1, num_experts=4)
ROUTES = ExpertRoutes(experts=bytes((0, 3)), num_layers=2, num_choices=1)


def bounds_of(run, model):
    return ResponseBounds.from_spec(
        run.spec,
        vocabulary_size=num_tokens(model),
        model_context_tokens=context_tokens(model.config.to_dict()),
    )


def make_one(**changes):
    """A trajectory of prompt (3, 4) and one sampled token, with some fields changed."""
    return replace(make_trajectory("lease", 0), **changes)


def of_length(num_tokens, **changes):
    return make_one(response_token_ids=(5,) * num_tokens, **changes)


@pytest.mark.parametrize(
    "trajectory",
    [
        make_one(),
        make_one(prompt_token_ids=(0, 22), response_token_ids=(22,)),
        of_length(5),
        of_length(6, prompt_token_ids=(3,)),
        make_one(reward=10.0),
        make_one(reward=-10.0),
    ],
    ids=["ordinary", "last token", "full context", "longest", "largest", "smallest"],
)
def test_what_is_at_the_bounds_is_accepted(trajectory):
    BOUNDS.check_trajectory(trajectory, path="t")


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (replace(ROUTES, experts=bytes((0, 4))), "expert_routes.experts: must be 0 to 3, got 4"),
        (replace(ROUTES, num_layers=1), "expert_routes.num_layers: must be 2, the model's, got 1"),
    ],
    ids=["expert", "layers"],
)
def test_routes_must_be_those_of_the_model(routes, problem):
    bounds = replace(BOUNDS, routers=ROUTERS)
    bounds.check_trajectory(make_one(expert_routes=ROUTES), path="t")
    with pytest.raises(InvalidMessageError) as error:
        bounds.check_trajectory(make_one(expert_routes=routes), path="t")
    assert str(error.value) == f"t.{problem}"


def test_routes_that_nobody_replays_are_refused():
    with pytest.raises(InvalidMessageError, match=r"none \(spec.algorithm.routerReplay"):
        BOUNDS.check_trajectory(make_one(expert_routes=ROUTES), path="t")


@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (make_one(prompt_token_ids=(3, 23)), "t.prompt_token_ids[1]: must be 0 to 22, got 23"),
        (make_one(response_token_ids=(99,)), "t.response_token_ids[0]: must be 0 to 22, got 99"),
        (
            of_length(7, prompt_token_ids=(3,)),
            "t.response_token_ids: must be at most 6 tokens (spec.sampling.maxNewTokens), got",
        ),
        (
            of_length(6),
            "t.response_token_ids: must be at most 7 tokens with the prompt (the model's context)",
        ),
        (make_one(reward=10.5), "t.reward: must be -10 to 10 (spec.environment.maxAbsoluteReward)"),
    ],
    ids=["prompt", "response", "too long", "context", "reward"],
)
def test_what_is_beyond_is_refused_by_the_name_of_its_field(trajectory, problem):
    with pytest.raises(InvalidMessageError) as caught:
        BOUNDS.check_trajectory(trajectory, path="t")
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("vocabulary_size", "partial", "problem"),
    [
        (
            None,
            make_partial_response(*[0] * 6),
            "b.token_ids: must be at most 6 tokens, and fewer unless",
        ),
        # Tokens of `make_partial_response` count up from 5.
        (8, make_partial_response(*[0] * 4), "b.token_ids[3]: must be 0 to 7, got 8"),
    ],
    ids=["nothing left to sample", "vocabulary"],
)
def test_a_partial_response_keeps_to_the_same_bounds(vocabulary_size, partial, problem):
    bounds = replace(BOUNDS, vocabulary_size=vocabulary_size, context_tokens=None)
    with pytest.raises(InvalidMessageError) as caught:
        bounds.check_partial_response(partial, path="b")
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_bounds_are_the_models_and_the_runs(make):
    run = make_run(
        sampling={"maxNewTokens": 5}, environment={"name": "sort_digits", "maxAbsoluteReward": 2.5}
    )
    assert bounds_of(run, make()) == ResponseBounds(
        vocabulary_size=23, max_new_tokens=5, context_tokens=64, max_absolute_reward=2.5
    )


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_longest_response_that_fills_the_context_is_refused_at_the_start(make):
    with pytest.raises(ValueError, match=r"spec\.sampling\.maxNewTokens: leaves no room.*got 64"):
        bounds_of(make_run(sampling={"maxNewTokens": 64}), make())
    assert bounds_of(make_run(sampling={"maxNewTokens": 63}), make()).context_tokens == 64


def test_a_head_with_fewer_rows_than_the_embedding_bounds_the_tokens():
    heads = SimpleNamespace(
        get_input_embeddings=lambda: torch.nn.Embedding(32, 4),
        get_output_embeddings=lambda: torch.nn.Linear(4, 30),
    )
    assert num_tokens(heads) == 30
