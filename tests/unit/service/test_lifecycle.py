"""Start and end of a service: ready files, addresses, signals, and its parent process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vcpo.service.lifecycle import (
    Ready,
    StartError,
    read_ready,
    split_address,
    start_errors,
    write_ready,
)

READY = Ready(pid=12, grpc_port=7600, metrics_port=7601)
TIMEOUT_S = 60
SERVICE = """
import asyncio, sys
from vcpo.service.lifecycle import on_parent_exit, on_stop_request

async def serve():
    stopped = asyncio.get_running_loop().create_future()
    on_stop_request(stopped.set_result)
    on_parent_exit(stopped.set_result)
    print("serving", flush=True)
    print(await stopped, flush=True)

asyncio.run(serve())
"""


@pytest.mark.parametrize("problem", [OSError("port taken"), ValueError("no port")])
def test_what_the_user_must_put_right_while_starting_is_a_start_error(problem):
    with pytest.raises(StartError, match=str(problem)), start_errors():
        raise problem


def test_a_bug_while_starting_stays_a_bug():
    with pytest.raises(KeyError), start_errors():
        raise KeyError("bug")


@pytest.fixture
def service() -> Iterator[subprocess.Popen[str]]:
    """A process that serves until it is told, in one of the two ways, to stop."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVICE], text=True, **pipes) as process:
        assert process.stdout.readline() == "serving\n"
        yield process
        process.kill()


def last_words(service: subprocess.Popen[str]) -> str:
    """What a service that was told to stop says, while its standard input stays open."""
    service.wait(TIMEOUT_S)
    return service.stdout.read()


def test_a_ready_file_is_read_as_it_was_written(tmp_path):
    write_ready(tmp_path / "learner.json", READY)
    assert read_ready(tmp_path / "learner.json") == READY


def test_a_ready_file_leaves_nothing_beside_it(tmp_path):
    write_ready(tmp_path / "learner.json", READY)
    assert [path.name for path in tmp_path.iterdir()] == ["learner.json"]


def test_a_ready_file_replaces_the_one_before(tmp_path):
    write_ready(tmp_path / "learner.json", Ready(pid=1, grpc_port=2, metrics_port=3))
    write_ready(tmp_path / "learner.json", READY)
    assert read_ready(tmp_path / "learner.json") == READY


def test_a_service_that_is_not_up_has_no_ready_file(tmp_path):
    assert read_ready(tmp_path / "learner.json") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_a_service_to_stop(service, number):
    service.send_signal(number)
    assert last_words(service) == f"{number.name}\n"


def test_the_end_of_its_parent_stops_a_service(service):
    said, _ = service.communicate(timeout=TIMEOUT_S)  # closes the service's standard input
    assert (said, service.returncode) == ("the host process has ended\n", 0)


def test_what_a_parent_says_does_not_stop_a_service(service):
    service.stdin.write("anything\n" * 1000)
    service.stdin.flush()
    service.send_signal(signal.SIGTERM)
    assert last_words(service) == "SIGTERM\n"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("learner.ns.svc:7600", ("learner.ns.svc", 7600)),
        ("[::1]:65535", ("[::1]", 65535)),
    ],
)
def test_an_address_is_split_at_its_last_colon(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "7600", ":7600", "host", "host:", "host:x", "host:65536"])
def test_what_is_no_address_is_refused_with_its_value(address):
    with pytest.raises(ValueError, match=f"address: must be host:port, got '{address}'"):
        split_address(address)
