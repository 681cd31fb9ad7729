"""Child processes are started, watched and stopped; none is orphaned and no other is touched."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.unit.local.processes.fake_processes import RUN, RUN_OF_TWO_RANKS
from vcpo.local.processes.child import ChildProcess, start_child, stop_children
from vcpo.local.processes.forks import can_fork, fork_services
from vcpo.service.lifecycle import Ready, write_ready

TIMEOUT_S = 60
OBEDIENT = "import sys; sys.stdin.read()"
STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("up")
signal.pause()
"""
HOST = """
import pathlib, sys, time
from vcpo.local.processes.child import start_child
folder = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2]]
files = {"log": folder / "log", "ready_file": folder / "ready"}
print(start_child("child", command, environment={}, **files).process.pid, flush=True)
time.sleep(3600)
"""

Start = Callable[..., ChildProcess]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Starts Python code as a child; whatever is left of it goes after the test."""
    started: list[ChildProcess] = []

    def start_code(code: str, *arguments: str, **environment: str) -> ChildProcess:
        name = f"child-{len(started)}"
        child = start_child(
            name,
            [sys.executable, "-c", code, *arguments],
            log=tmp_path / f"{name}.log",
            ready_file=tmp_path / f"{name}.json",
            environment=environment,
        )
        started.append(child)
        return child

    yield start_code
    for child in started:
        child.kill()
        child.process.wait(TIMEOUT_S)
        child.close_stdin()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def has_ended(pid_descriptor: int) -> bool:
    """Wait for the end of a process that is not ours to wait for."""
    readable, _, _ = select.select([pid_descriptor], [], [], TIMEOUT_S)
    return bool(readable)


def test_what_the_user_must_put_right_is_reported_without_what_was_logged_before_it(start):
    child = start(
        "from vcpo.service.lifecycle import StartError, report_start_error; import sys;"
        "print('retrying'); sys.stdout.flush();"
        "sys.exit(report_start_error(StartError('model: is gone\\nmake it')))"
    )
    child.process.wait(TIMEOUT_S)
    assert child.exit_code == 2
    assert child.describe_failure() == "cannot start: model: is gone\nmake it"


def test_a_child_that_served_before_it_complained_gave_up(start):
    child = start(
        "from vcpo.service.lifecycle import StartError, report_start_error; import sys;"
        "sys.stdin.readline(); sys.exit(report_start_error(StartError('32 generations failed')))"
    )
    write_ready(child.ready_file, Ready(pid=1, grpc_port=2, metrics_port=3))
    child.close_stdin()
    child.process.wait(TIMEOUT_S)
    assert child.describe_failure() == "gave up: 32 generations failed"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("print(' 50%|##   | 1/2 [00:01<00:01]'); [].pop()", ": IndexError: pop from empty list"),
        ("print('2026-11-29 10:00:00,123 INFO version 0 is in use'); exit(1)", ""),
    ],
)
def test_a_crash_is_reported_by_its_exception_and_where_to_read_on(start, code, cause):
    child = start(code)
    child.process.wait(TIMEOUT_S)
    assert child.describe_failure() == f"ended with status 1{cause} (log: {child.log})"


def test_a_killed_child_is_reported_by_its_signal_alone(start):
    child = start("print('all is well', flush=True); import sys; sys.stdin.read()")
    child.kill()
    child.process.wait(TIMEOUT_S)
    expected = "was killed by SIGKILL, as the system does when memory runs out"
    assert child.describe_failure() == f"{expected} (log: {child.log})"


def test_a_ready_file_of_an_earlier_process_is_ignored(start, tmp_path):
    write_ready(tmp_path / "child-0.json", Ready(pid=1, grpc_port=2, metrics_port=3))
    assert start(OBEDIENT).ready is None


async def test_all_leave_when_asked_and_one_that_is_stopped_too(start):
    children = [start(OBEDIENT), start(OBEDIENT)]
    children[0].process.send_signal(signal.SIGSTOP)
    await stop_children(children, TIMEOUT_S)
    assert [child.exit_code for child in children] == [-signal.SIGTERM, -signal.SIGTERM]


async def test_a_stubborn_child_is_killed(start, tmp_path):
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    child = start(STUBBORN, str(fifo))
    assert fifo.read_text(encoding="utf-8") == "up"  # it no longer listens to SIGTERM
    await stop_children([child], 0.0)
    assert child.exit_code == -signal.SIGKILL


SERVICE = f"""
import pathlib, sys
from vcpo.service.lifecycle import wake_at_parent_exit
wake_at_parent_exit()
pathlib.Path("up").touch()
{OBEDIENT}
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_orphan_stays_when_the_host_is_killed(tmp_path, is_stopped):
    command = [sys.executable, "-c", HOST, str(tmp_path), SERVICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as host:
        orphan = os.pidfd_open(int(host.stdout.readline()))
        wait_until((tmp_path / "up").exists)
        if is_stopped:
            signal.pidfd_send_signal(orphan, signal.SIGSTOP)
        host.kill()
    try:
        assert has_ended(orphan)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(orphan, signal.SIGKILL)
        os.close(orphan)


FORKING = """
import pathlib, sys
from vcpo.local.processes import forks
from vcpo.local.processes.child import start_child
folder, (own, idle) = pathlib.Path(), forks._fork(2)
files = {"log": folder / "log", "ready_file": folder / "ready", "environment": {"A": "b"}}
child = start_child("c", ["python", "-P", "-m", "work", "--a"], fork=own, **files)
while child.exit_code is None: pass
print(idle.pid, child.exit_code, flush=True)
sys.stdin.read()
"""
WORK = "import os, sys; print(sys.argv[1:], os.environ['A'], os.getsid(0) - os.getpid()); exit(69)"


def test_a_fork_works_as_a_child_and_none_that_waits_outlives_a_killed_host(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": tmp_path, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKING], **pipes) as host:
        idle, status = map(int, host.stdout.readline().split())
        wait_until(lambda: os.getsid(idle) == idle)
        fork = os.pidfd_open(idle)
        signal.pidfd_send_signal(fork, signal.SIGSTOP)
        host.kill()
    assert (tmp_path / "log").read_text() == "['--a'] b 0\n"
    assert (status, has_ended(fork)) == (69, True)


BESIDE_A_STATUS = """
import _thread, time
from tests.unit.local.processes.fake_processes import RUN_OF_TWO_RANKS
from vcpo.local.processes import forks
forks._MODULES = ()
_thread.start_new_thread(time.sleep, (0.2,))  # threading knows none, as one it has joined
print(len(forks.fork_services(RUN_OF_TWO_RANKS, has_gpus=False)))
"""


def test_a_thread_that_ends_keeps_no_run_from_forking():
    found = subprocess.run(
        [sys.executable, "-c", BESIDE_A_STATUS], input=b"", capture_output=True, check=True
    )
    assert int(found.stdout) > 1


def test_what_must_import_for_itself_is_not_forked():
    run, group = RUN_OF_TWO_RANKS, RUN_OF_TWO_RANKS.spec.rollouts[0]
    assert not can_fork(run, group.model_copy(update={"engine": "vllm"}))
    assert not any(can_fork(RUN, each) for each in RUN.spec.rollouts)  # they have other threads
    assert fork_services(run, has_gpus=True) == []
