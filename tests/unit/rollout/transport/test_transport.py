"""Files of weights come from the server that the manifest names, with the key and over TLS."""

import pytest
from grpc import StatusCode, aio

from tests.fixtures.certificates import write_certificates
from tests.fixtures.learner.dispatcher import make_partial_response, make_trajectory
from tests.fixtures.rollout.policy_versions import payload_of, served_versions
from tests.fixtures.rollout.worker import learner_fixture
from tests.unit.rollout.transport.failing_service import (
    HELD,
    FailingLearner,
    channel_to,
    learner_at,
)
from vcpo.metrics import RolloutMetrics
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.access.roles import CallerRole, new_key
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.client import open_channel
from vcpo.wire.errors import (
    InvalidMessageError,
    NotFoundError,
    SetAsideError,
    UnavailableError,
    WireError,
)
from vcpo.wire.phase import RunPhase
from vcpo.wire.weights import full_set_name
from vcpo_rollout import command
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport import learner_client as learner_module
from vcpo_rollout.transport.learner_client import (
    LearnerFailedError,
    Retries,
    SubmissionRefusedError,
)
from vcpo_rollout.transport.weight_files import ArrivingFile, WeightFiles, server_address

KEY = new_key()
NAME = "localhost"


@pytest.mark.parametrize(
    ("address", "learner", "expected"),
    [
        (":7601", "learner:7600", ("learner", 7601)),
        (":7601", "[::1]:7600", ("::1", 7601)),
        ("rank-3:7601", "learner:7600", ("rank-3", 7601)),
    ],
)
def test_an_address_without_a_host_is_a_port_of_the_learner(address, learner, expected):
    assert server_address(address, learner) == expected


async def read(folder, manifest):
    gauges = RolloutGauges(RolloutMetrics(run="run", group="main"))
    certificates = CertificateFolder(folder)
    files = WeightFiles(f"{NAME}:7600", gauges, key=KEY, certificates=certificates)
    name = full_set_name(manifest.full_set_version)
    whole = ArrivingFile(name=name, total_bytes=manifest.total_bytes)
    await files.read(manifest, [whole])
    return whole.content


async def test_files_come_from_the_server_that_is_named_with_the_key_and_over_tls(tmp_path):
    write_certificates(tmp_path, [NAME])
    server = {"keys": {CallerRole.WORKER: KEY}, "certificates": CertificateFolder(tmp_path)}
    with served_versions(4, **server) as learner:
        assert await read(tmp_path, learner.manifest()) == payload_of(4)
        write_certificates(tmp_path, [NAME])  # of a new authority, which both sides follow
        assert await read(tmp_path, learner.manifest()) == payload_of(4)


async def test_a_server_of_another_authority_gets_no_key(tmp_path):
    write_certificates(tmp_path / "theirs", [NAME])
    write_certificates(tmp_path / "ours", [NAME])
    with served_versions(4, certificates=CertificateFolder(tmp_path / "theirs")) as stranger:
        with pytest.raises(OSError, match="certificate verify failed"):
            await read(tmp_path / "ours", stranger.manifest())
        assert stranger.requests == []


async def test_a_refused_submission_says_what_was_wrong_with_it():
    failing = FailingLearner(
        InvalidMessageError("trajectories[0].reward", "nan", "a finite number")
    )
    async with channel_to(failing) as channel:
        with pytest.raises(SubmissionRefusedError, match=r"trajectories\[0\]\.reward: must be"):
            await learner_at(channel).submit("l", [make_trajectory("l", 0)])


async def test_a_learner_without_a_first_version_is_asked_again():
    failing = FailingLearner(NotFoundError("policy: no version has been published yet"))
    async with channel_to(failing) as channel:
        manifest = await learner_at(channel).newest_policy(None, wait_s=0)
    assert manifest.policy_version == 3
    assert not failing.requests[0].HasField("held_policy_version")


async def test_a_group_is_split_into_submissions_by_its_bytes():
    failing = FailingLearner()
    group = [make_trajectory("l", number) for number in range(3)]
    two = 2 * 45  # one such response takes 40 to 45 bytes
    async with channel_to(failing) as channel:
        await learner_at(channel, submit_bytes=two).submit("l", group)
    sizes = [[one.trajectory_id for one in each.trajectories] for each in failing.requests]
    assert sizes == [["l/0", "l/1"], ["l/2"]]


async def test_only_what_the_learner_took_is_counted():
    async with channel_to(FailingLearner()) as channel:
        learner = learner_at(channel, submit_bytes=1)
        assert await learner.submit("l", [make_trajectory("l", 0), make_trajectory("l", 1)]) == 1


async def test_a_repeated_submission_counts_as_taken():
    async with learner_fixture() as fixture:
        fixture.publish(0)
        learner = fixture.client()
        given = await learner.lease(held=HELD, max_trajectories=2, wait_s=0)
        lease_id = given.leases[0].lease_id
        group = [make_trajectory(lease_id, number) for number in range(2)]
        assert [await learner.submit(lease_id, group) for _ in range(2)] == [2, 2]
        assert fixture.ledger.counts().buffered == 2


async def test_leaving_a_learner_that_is_gone_is_no_error():
    channel = open_channel("127.0.0.1:1", key=None)
    await learner_at(channel).release_all()
    await channel.close()


async def test_the_longest_partial_responses_are_released_when_a_message_cannot_hold_all(
    monkeypatch,
):
    monkeypatch.setattr(learner_module, "MAX_PARTIAL_TOKENS", 5)
    partial = [make_partial_response(*[0] * size) for size in (1, 3, 2)]
    failing = FailingLearner(UnavailableError("restarting"))
    async with channel_to(failing) as channel:
        await learner_at(channel).release("lease", partial)
    _, request = failing.requests
    assert [len(one.token_ids) for one in request.begun] == [4 * 3, 4 * 2]


async def test_a_refused_hand_back_is_no_error():
    async with channel_to(FailingLearner(InvalidMessageError("begun", "x", "y"))) as channel:
        await learner_at(channel).release("lease", [make_partial_response(0)])


def codes(names):
    return [StatusCode[each] for each in names.split()]


DOUBTFUL = codes("INTERNAL UNKNOWN CANCELLED DATA_LOSS")
FINAL = codes("INVALID_ARGUMENT UNAUTHENTICATED NOT_FOUND")
FINAL += codes("PERMISSION_DENIED FAILED_PRECONDITION UNIMPLEMENTED")
TRANSIENT = codes("UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED")


def trouble(code):
    error = WireError(f"trouble with {code.name}")
    error.status = code
    return error


async def lease_from(channel, **settings):
    return await learner_at(channel, **settings).lease(held=HELD, max_trajectories=4, wait_s=0)


@pytest.mark.parametrize("code", DOUBTFUL, ids=lambda code: code.name)
async def test_ten_doubtful_failures_in_a_row_end_a_call_with_the_last_error(code):
    failing = FailingLearner(*[trouble(code)] * 20)
    async with channel_to(failing) as channel:
        with pytest.raises(LearnerFailedError) as failed:
            await lease_from(channel)
    assert len(failing.requests) == 10
    assert str(failed.value).startswith(
        f"Lease failed 10 times in a row, at last with {code.name}: trouble with {code.name}; look"
    )


@pytest.mark.parametrize("code", TRANSIENT, ids=lambda code: code.name)
async def test_an_unavailable_learner_is_asked_without_end_and_restarts_the_count_of_other_failures(
    code,
):
    away, doubtful = trouble(code), trouble(StatusCode.INTERNAL)
    failing = FailingLearner(*[away] * 15, *[doubtful] * 9, away, *[doubtful] * 9)
    async with channel_to(failing) as channel:
        given = await lease_from(channel)
    assert not failing.failures
    assert (given.phase, len(given.leases), given.retry_after_s) == (RunPhase.DRAINING, 1, 0.25)


@pytest.mark.parametrize("code", FINAL, ids=lambda code: code.name)
async def test_a_request_that_is_refused_is_not_repeated(code):
    failing = FailingLearner(trouble(code))
    async with channel_to(failing) as channel:
        with pytest.raises(aio.AioRpcError, match=f"trouble with {code.name}"):
            await lease_from(channel)
    assert len(failing.requests) == 1


async def test_pauses_double_up_to_five_seconds_and_are_jittered():
    pauses_s = []

    async def pause(seconds):
        pauses_s.append(seconds)

    failing = FailingLearner(*[trouble(StatusCode.UNAVAILABLE)] * 8)
    async with channel_to(failing) as channel:
        await lease_from(channel, retries=Retries(pause))
    bounds_s = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert len(pauses_s) == len(bounds_s)
    for pause_s, bound_s in zip(pauses_s, bounds_s, strict=True):
        assert bound_s / 2 <= pause_s <= bound_s
    assert len(set(pauses_s)) == len(pauses_s)


async def test_a_worker_that_was_set_aside_does_not_ask_again():
    failing = FailingLearner(SetAsideError(SetAsideCause.FAILING, "16 generations failed"))
    async with channel_to(failing) as channel:
        with pytest.raises(SetAsideError, match="16 generations failed") as refused:
            await lease_from(channel)
    assert refused.value.cause is SetAsideCause.FAILING
    assert len(failing.requests) == 1


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (LearnerFailedError("Lease failed"), 1, "learner: Lease failed"),
        (
            aio.AioRpcError(
                StatusCode.UNAUTHENTICATED, aio.Metadata(), aio.Metadata(), details="set the key"
            ),
            1,
            "learner: refused with UNAUTHENTICATED: set the key",
        ),
        (
            SetAsideError(SetAsideCause.MISMATCH, "0.4 nats a token off"),
            77,
            "set aside by the learner: mismatch: 0.4 nats a token off",
        ),
    ],
    ids=["failed", "refused", "set aside"],
)
def test_a_worker_that_ends_says_why(monkeypatch, tmp_path, error, status, cause):
    monkeypatch.setenv("VCPO_TERMINATION_LOG", str(tmp_path / "end"))

    async def run_worker(options):
        raise error

    monkeypatch.setattr(command, "run_worker", run_worker)
    monkeypatch.setattr("sys.argv", ["vcpo_rollout", "run.yaml", "--learner", "l", "--group", "g"])
    assert command.main() == status
    assert (tmp_path / "end").read_text() == cause
