"""The learner's services over a real channel: what they refuse, and what they pass on."""

import grpc
import pytest
import pytest_asyncio
import safetensors.torch
import torch

from tests.unit.learner.scenes import INCARNATION
from tests.unit.rollout.scenes import a_learner
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.packing import pack_logprobs, pack_token_ids
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc, work_pb2, work_pb2_grpc


@pytest_asyncio.fixture
async def place():
    async with a_learner() as place:
        place.publish(0)
        yield place


def lease_request(**changes):
    values = {
        "worker_id": "w",
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
async def test_a_malformed_request_for_work_names_the_field(place, change, field):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Lease(lease_request(**change), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must be")


async def test_a_lease_says_what_to_sample_and_how(place):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    (lease,) = (await stub.Lease(lease_request(), timeout=5)).leases
    assert (lease.split, lease.prompt_index) == (work_pb2.SPLIT_TRAIN, 0)
    assert (lease.num_trajectories, lease.timeout_seconds) == (2, 10.0)
    assert (lease.sampling.temperature, lease.sampling.max_new_tokens) == (1.0, 1024)


async def test_an_answer_without_leases_says_when_to_ask_again(place):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    response = await stub.Lease(lease_request(max_trajectories=1), timeout=5)
    assert not response.leases
    assert response.retry_after_seconds > 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (work_pb2.SubmitRequest(worker_id="w", lease_id="l"), "trajectories"),
        (
            work_pb2.SubmitRequest(
                worker_id="w",
                lease_id="l",
                trajectories=[work_pb2.Trajectory()],
                failure=work_pb2.Failure(),
            ),
            "failure",
        ),
        (
            work_pb2.SubmitRequest(
                worker_id="w", lease_id="l", trajectories=[work_pb2.Trajectory()]
            ),
            "trajectories[0].trajectory_id",
        ),
    ],
    ids=["nothing", "both", "empty trajectory"],
)
async def test_a_malformed_submission_names_the_field(place, request_, field):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Submit(request_, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must be")


def begun_message(num_tokens, **changes):
    return work_pb2.PartialResponse(
        token_ids=pack_token_ids([5] * num_tokens),
        logprobs=pack_logprobs([-0.5] * num_tokens),
        version_spans=[work_pb2.VersionSpan(num_tokens=num_tokens)],
        **changes,
    )


async def test_a_lease_carries_what_was_handed_back_with_its_prompt(place):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    (lease,) = (await stub.Lease(lease_request(), timeout=5)).leases
    begun = [begun_message(3), begun_message(1024, finish_reason=work_pb2.FINISH_REASON_LENGTH)]
    release = work_pb2.ReleaseRequest(worker_id="w", lease_ids=[lease.lease_id], begun=begun)
    assert (await stub.Release(release, timeout=5)).num_released == 1
    (again,) = (await stub.Lease(lease_request(worker_id="another"), timeout=5)).leases
    assert again.prompt_index == lease.prompt_index
    assert list(again.begun) == begun


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lease_ids": []}, "lease_ids: must be the one lease"),
        ({"lease_ids": ["one", "two"]}, "lease_ids: must be the one lease"),
        ({"begun": [begun_message(1024)]}, "begun[0].token_ids: must be shorter than 1024"),
        ({"begun": [work_pb2.PartialResponse()]}, "begun[0].token_ids: must be 1 to"),
        ({"begun": [begun_message(1)] * 3}, "begun: must be at most 2 answers"),
    ],
    ids=["no lease", "two leases", "too long", "empty", "too many"],
)
async def test_answers_that_cannot_be_gone_on_with_are_refused(place, change, problem):
    stub = work_pb2_grpc.WorkServiceStub(place.channel)
    fields = {"worker_id": "w", "lease_ids": ["one"], "begun": [begun_message(1)]}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Release(work_pb2.ReleaseRequest(**{**fields, **change}), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(problem)


async def test_a_version_is_streamed_in_pieces_from_any_offset(place):
    payload = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
    policy = place.store.get(INCARNATION, 0)
    place.store.publish(type(policy)(manifest=policy.manifest, payload=payload))
    stub = policy_pb2_grpc.PolicyServiceStub(place.channel)
    request = policy_pb2.FetchRequest(worker_id="w", incarnation=INCARNATION, offset=2)
    chunks = [chunk async for chunk in stub.Fetch(request, timeout=5)]
    assert [(chunk.offset, len(chunk.data)) for chunk in chunks] == [
        (2, CHUNK_BYTES),
        (2 + CHUNK_BYTES, 2),
    ]
    assert b"".join(chunk.data for chunk in chunks) == payload[2:]


async def test_an_offset_behind_the_end_is_refused(place):
    stub = policy_pb2_grpc.PolicyServiceStub(place.channel)
    request = policy_pb2.FetchRequest(worker_id="w", incarnation=INCARNATION, offset=1 << 40)
    with pytest.raises(grpc.aio.AioRpcError, match="offset: must be less than"):
        await stub.Fetch(request, timeout=5).read()


async def test_a_holder_of_an_older_version_is_told_the_deltas_from_there_and_can_fetch_them(place):
    for version in (1, 2):
        weight = torch.zeros(1000)
        weight[version] = 1.0
        payload = safetensors.torch.save({"weight": weight})
        place.store.publish(place.store.prepare(version, payload))
    stub = policy_pb2_grpc.PolicyServiceStub(place.channel)
    ask = policy_pb2.GetManifestRequest(
        worker_id="w", held_policy_version=1, held_incarnation=INCARNATION
    )
    (delta,) = (await stub.GetManifest(ask, timeout=5)).deltas
    assert (delta.base_policy_version, delta.policy_version) == (1, 2)
    request = policy_pb2.FetchRequest(
        worker_id="w", incarnation=INCARNATION, policy_version=2, base_policy_version=1
    )
    (chunk,) = [chunk async for chunk in stub.Fetch(request, timeout=5)]
    assert chunk.data == place.store.get_delta(INCARNATION, 2, 1).data
    assert len(chunk.data) == delta.total_bytes
