"""Calls that fail for a while, for good, or for unknown reasons, over a real channel."""

import pytest
from grpc import StatusCode, aio

from tests.unit.rollout.transport.failing_service import (
    HELD,
    FailingLearner,
    channel_to,
    learner_at,
)
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.errors import SetAsideError, WireError
from vcpo_rollout import __main__ as command
from vcpo_rollout.transport.retries import LearnerFailedError, Retries


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
async def test_a_doubtful_failure_is_repeated_and_may_pass(code):
    failing = FailingLearner(*[trouble(code)] * 9)
    async with channel_to(failing) as channel:
        await lease_from(channel)
    assert len(failing.requests) == 10


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
        await lease_from(channel)
    assert not failing.failures


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
