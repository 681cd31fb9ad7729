import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.fixtures.certificates import write_certificates
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.errors import InvalidMessageError, UnavailableError
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import reward_pb2, reward_pb2_grpc
from vcpo_rollout.environments import Prompt
from vcpo_rollout.environments.rewards.server import RewardServer

PROMPT = Prompt(text="sort 21=", answer="12", metadata={"numbers": (2, 1), "kind": int})


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Raises what it is told to, one error per call, then answers with the response's length."""

    def __init__(self):
        self.errors = []
        self.requests = []

    async def Score(self, request, context):  # noqa: N802 - named by the contract
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return reward_pb2.ScoreResponse(reward=len(request.response) / 2)


@asynccontextmanager
async def serve_judge(judge, keys=None):
    server = WireServer(keys=keys)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(judge, server.grpc_server)
    port = await server.start("127.0.0.1:0", ())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_the_server_is_shown_prompt_truth_and_response_and_its_word_counts():
    judge = Judge()
    async with serve_judge(judge) as address:
        assert await asyncio.to_thread(RewardServer(address=address), PROMPT, "123") == 1.5
    (request,) = judge.requests
    assert (request.prompt, request.answer, request.response) == ("sort 21=", "12", "123")
    assert json.loads(request.metadata) == {"numbers": [2, 1], "kind": "<class 'int'>"}


async def test_a_server_that_is_busy_for_a_moment_is_asked_again():
    judge = Judge()
    judge.errors = [UnavailableError("busy")]
    async with serve_judge(judge) as address:
        assert await asyncio.to_thread(RewardServer(address=address), PROMPT, "12") == 1.0
    assert len(judge.requests) == 2


async def test_a_refusal_is_an_error_and_is_not_repeated():
    judge = Judge()
    judge.errors = [InvalidMessageError("response", "12", "a poem")]
    async with serve_judge(judge) as address:
        with pytest.raises(grpc.RpcError, match="response: must be a poem"):
            await asyncio.to_thread(RewardServer(address=address), PROMPT, "12")
    assert len(judge.requests) == 1


def test_a_server_that_is_not_there_is_an_error_after_the_deadline():
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        RewardServer(address="127.0.0.1:1", timeout_seconds=0.2)(PROMPT, "12")


async def test_the_key_for_rewards_is_shown_to_the_server_and_no_key_of_the_run(monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret")
    async with serve_judge(Judge(), keys={CallerRole.REWARD: "secret"}) as address:
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            await asyncio.to_thread(RewardServer(address=address), PROMPT, "12")
        monkeypatch.setenv("VCPO_REWARD_KEY", "secret")
        assert await asyncio.to_thread(RewardServer(address=address), PROMPT, "12") == 1.0


@pytest.mark.parametrize("over_tls", [False, True])
def test_the_example_server_judges(over_tls, tmp_path):
    write_certificates(tmp_path, ["localhost"])
    command = [sys.executable, "examples/reward_server.py", "--listen", "127.0.0.1:0"]
    command += [f"--tls={tmp_path}"] if over_tls else []
    authority = str(tmp_path / "ca.crt") if over_tls else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = server.stdout.readline().split()[-1]
            # Two characters of two and of two in common: 2 * 1 / 4 and 2 * 2 / 4.
            judge = RewardServer(address=f"localhost:{port}", authority=authority)
            rewards = [judge(PROMPT, each) for each in ("21", "12")]
        finally:
            server.kill()
    assert rewards == [0.5, 1.0]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"address": "somewhere"},
            r"environment.parameters.address: 'somewhere' is not an address",
        ),
        ({"address": 7070}, r"environment.parameters.address: 7070 is not an address"),
        (
            {"address": "judge:7070"},
            r"environment.parameters.address: others could read along with",
        ),
        ({"plain_text": "yes"}, r"environment.parameters.plain_text: 'yes' is neither true nor"),
        (
            {"plain_text": True, "authority": "ca.crt"},
            r"environment.parameters.plain_text: contradicts `authority`",
        ),
        ({"authority": "/nowhere"}, r"environment.parameters.authority: '/nowhere' cannot be read"),
        ({"timeout_seconds": 0}, r"environment.parameters.timeout_seconds: 0 is not a number of"),
        ({"timeout_seconds": True}, r"environment.parameters.timeout_seconds: True is not a"),
    ],
)
def test_a_bad_parameter_is_named(parameters, said):
    with pytest.raises(ValueError, match=said):
        RewardServer(**{"address": "127.0.0.1:1", **parameters})


def test_plain_text_beyond_this_machine_is_had_by_name():
    RewardServer(address="judge:7070", plain_text=True)
