"""Probes of the fake kubelet."""

import asyncio

import pytest

from tests.fakes.kubelet.environment import UnsupportedPodError
from tests.fakes.kubelet.probes import ProbeTarget, Tally, ask


async def succeed(command):
    return 0 if command == ["true"] else 1


TARGET = ProbeTarget(container={"name": "main"}, pod_ip="127.0.0.1", execute=succeed)


def verdicts(tally, answers):
    return [tally.count(success=answer) for answer in answers]


def test_a_failure_takes_several_failures_in_a_row():
    tally = Tally(failure_threshold=2)
    assert verdicts(tally, [False, True, False, False]) == [None, True, None, False]


def test_a_success_takes_as_many_as_its_threshold():
    assert verdicts(Tally(success_threshold=2), [True, True]) == [None, True]


@pytest.mark.parametrize(("command", "answer"), [(["true"], True), (["false"], False)])
async def test_a_command_answers_with_its_exit_code(command, answer):
    assert await ask({"exec": {"command": command}}, TARGET) is answer


async def test_a_port_that_is_listened_on_is_a_yes():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await ask({"tcpSocket": {"port": port}}, TARGET)


@pytest.mark.parametrize("kind", ["tcpSocket", "httpGet", "grpc"])
async def test_a_port_that_nobody_listens_on_is_a_no(kind, unused_tcp_port):
    assert not await ask({kind: {"port": unused_tcp_port}}, TARGET)


async def test_an_unknown_kind_of_probe_is_refused():
    with pytest.raises(UnsupportedPodError, match="carrierPigeon"):
        await ask({"carrierPigeon": {}}, TARGET)
