"""What isolates a program, each mechanism in real children: bubblewrap, namespaces, filters."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.fixtures.rollout.sandbox import run
from vcpo.metrics.label_values import SandboxMechanism
from vcpo_rollout.sandbox import runner
from vcpo_rollout.sandbox.bubblewrap import find_bubblewrap
from vcpo_rollout.sandbox.runner import Isolation, SandboxError, SandboxLimits, isolation

_NOBODY = 65_534


def test_the_protections_that_a_mechanism_lacks_are_named(system):
    missing = ("disk",) if system is SandboxMechanism.FILTERS else ()
    assert isolation() == Isolation(mechanism=system, missing=missing)


@pytest.fixture
def file_of_the_programs_user():
    """A file that the user ids of a program may change, outside of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept"
        file.write_text("kept")
        file.chmod(0o600)
        os.utime(file, (1, 1))
        if os.geteuid() == 0:
            Path(folder).chmod(0o711)
            os.chown(file, _NOBODY, _NOBODY)
        yield file


CHANGES = {
    "mode": "os.chmod(path, 0o777)",
    "owner": "os.chown(path, os.getuid(), os.getgid())",
    "times": "os.utime(path, (2, 2))",
    "attributes": "os.setxattr(path, 'user.vcpo', b'1')",
    "length": "os.truncate(path, 0)",
    "name": "os.rename(path, path + '2')",
}


def reasons(prelude, calls):
    """Why each call failed in one program, None where it did not."""
    tried = "".join(
        f"\ntry:\n {call}\nexcept OSError as error:\n print('{name}', type(error).__name__)"
        for name, call in calls.items()
    )
    said = dict(line.split() for line in run(f"{prelude}{tried}").splitlines())
    return [said.get(name) for name in calls]


def test_files_outside_stay_as_they_are(system, file_of_the_programs_user):
    before = file_of_the_programs_user.stat()
    has_own_root = system is SandboxMechanism.BUBBLEWRAP
    refusal = "FileNotFoundError" if has_own_root else "PermissionError"
    refusals = reasons(f"import os\npath = {str(file_of_the_programs_user)!r}", CHANGES)
    assert refusals == [refusal] * len(CHANGES)
    assert file_of_the_programs_user.stat() == before
    assert os.listxattr(file_of_the_programs_user) == []


def test_a_program_sets_the_modes_of_its_files_where_no_others_are_in_reach(system):
    said = run(
        "import os\nopen('a', 'w').close()\nos.chmod('a', 0o640)\nprint(os.stat('a').st_mode)"
    )
    if system is SandboxMechanism.BUBBLEWRAP:
        assert said == str(0o100640)
    else:
        assert said.endswith("PermissionError: [Errno 13] Permission denied: 'a'")


@pytest.fixture
def process_of_the_programs_user():
    user = _NOBODY if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "600"], user=user, group=user) as process:
        yield process.pid
        process.kill()


INTRUSIONS = {
    "signal": "os.kill(pid, 9)",
    "limits": "resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))",
    "priority": "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "scheduler": "os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))",
    "processors": "os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})",
    # A process that owns a file gets the file's signal whenever the file can be read.
    "owner_of_a_file": "fcntl.fcntl(pipe, fcntl.F_SETOWN, pid)",
    "owner_of_a_kind": "fcntl.fcntl(pipe, 15, struct.pack('ii', 1, pid))",
    "signal_of_a_file": "fcntl.fcntl(pipe, fcntl.F_SETSIG, 15)",
    "owner_of_a_socket": "fcntl.ioctl(pair[0], 0x8901, struct.pack('i', pid))",
    "group_of_a_socket": "fcntl.ioctl(pair[0], 0x8902, struct.pack('i', pid))",
}


def test_other_processes_stay_as_they_are(system, process_of_the_programs_user):
    pid = process_of_the_programs_user

    def state():
        limits = Path(f"/proc/{pid}/limits").read_text()
        scheduling = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
        return limits, scheduling, os.sched_getaffinity(pid)

    before = state()
    prelude = (
        f"import fcntl, os, resource, socket, struct\npid = {pid}\n"
        "pipe = os.pipe()[0]\npair = socket.socketpair()"
    )
    refusals = reasons(prelude, INTRUSIONS)
    assert refusals == ["PermissionError"] * len(INTRUSIONS)
    assert state() == before


def test_a_program_runs_an_event_loop_and_sets_the_flags_of_its_files(system):
    source = (
        "import asyncio, fcntl, os\nasyncio.run(asyncio.sleep(0))\npipe = os.pipe()[0]\n"
        "fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)\nprint(os.get_blocking(pipe))"
    )
    assert run(source) == "False"


def test_a_program_may_read_and_lower_its_own_limits(system):
    source = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run(source) == "(9, 9)"


def test_bubblewrap_alone_hides_which_files_and_processes_there_are(system):
    places = ["/proc", "/sys", "/etc/passwd", "/usr/bin", "/dev/shm", __file__]
    exist = f"[path for path in {places} if os.path.exists(path)]"
    seen, _, pid = run(f"import os\nprint({exist}, os.getpid())").rpartition(" ")
    if system is SandboxMechanism.BUBBLEWRAP:
        interpreter = Path(sys.base_prefix)
        own = [path for path in places if interpreter in (Path(path), *Path(path).parents)]
        assert (seen, pid) == (str(own), "2")
    else:
        assert seen == str(places)


def test_a_program_has_no_capability_left(system):
    # capget: of the caller; its effective, permitted and inheritable rights.
    source = (
        "import ctypes\nheader = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "rights = (ctypes.c_uint32 * 6)()\n"
        "print(ctypes.CDLL(None).capget(header, rights), *rights)"
    )
    read_search = 1 << 2  # of a child of root, under Landlock
    kept = f"{read_search} {read_search} 0 0 0 0" if os.geteuid() == 0 else "0 0 0 0 0 0"
    assert run(source) == f"0 {kept}"


def test_a_signal_without_a_name_that_ends_a_program_is_told_by_its_number(system):
    assert run("import os\nos.kill(os.getpid(), 35)") == "[stopped: signal 35]"
    assert run("import os\nos.kill(os.getpid(), 11)") == "[stopped: SIGSEGV]"


def test_no_more_files_than_the_limit_fit_into_the_folder(system):
    said = run("for number in range(5000): open(str(number), 'w').close()")
    if system is SandboxMechanism.FILTERS:  # the parent looks ten times a second
        assert said in {"", "[stopped: its files exceed 67,108,864 bytes]"}
    else:
        assert "OSError: [Errno 28] No space left on device" in said


@pytest.fixture
def broken_bubblewrap(tmp_path):
    """A bubblewrap that the system refuses the namespaces, as most pods do."""
    path = tmp_path / "bwrap"
    path.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    path.chmod(0o755)
    isolation.cache_clear()
    yield str(path)
    isolation.cache_clear()


def test_where_bubblewrap_is_refused_a_program_runs_without_it_and_the_reason_is_logged(
    broken_bubblewrap, monkeypatch, caplog
):
    monkeypatch.setattr(runner, "find_bubblewrap", lambda: broken_bubblewrap)
    with caplog.at_level("INFO"):
        assert run("print(1)") == "1"
    assert isolation().mechanism is not SandboxMechanism.BUBBLEWRAP
    assert "bubblewrap does not work on this system: bwrap: Creating new namespace" in caplog.text


def test_a_program_that_bubblewrap_could_not_start_is_no_output_of_the_program(
    broken_bubblewrap, monkeypatch
):
    how = Isolation(mechanism=SandboxMechanism.BUBBLEWRAP, missing=())
    monkeypatch.setattr(runner, "isolation", lambda: how)
    monkeypatch.setattr(runner, "find_bubblewrap", lambda: broken_bubblewrap)
    with pytest.raises(SandboxError, match="cannot run: bwrap: Creating new namespace failed"):
        run("print(1)")


def test_a_program_does_not_begin_after_its_workers_death(system, tmp_path):
    child = runner._Child(
        source="",
        folder=str(tmp_path),
        limits=SandboxLimits(),
        bubblewrap=find_bubblewrap() if system is SandboxMechanism.BUBBLEWRAP else None,
        is_watched=False,
        reports=False,
    )
    tmp_path.chmod(0o777)
    of_worker, of_child = socket.socketpair()
    with of_child:
        of_worker.close()
        done = subprocess.run(
            child._command(of_child.fileno()),
            input=b"print('begun')",
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            pass_fds=(of_child.fileno(),),
            check=False,
        )
    assert (done.returncode, done.stdout) == (1, b"")


ESCAPES = {
    "no escape": "",
    "all escapes": "import ctypes, os, signal\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
    "try: os.setsid()\nexcept OSError: pass\n"
    "for number in range(1, 65):\n try: signal.signal(number, signal.SIG_IGN)\n"
    " except (OSError, ValueError): pass",
}


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["bubblewrap", "no bubblewrap"])
def test_a_program_ends_with_the_worker_that_is_killed(escape, is_wrapped):
    program = f"{ESCAPES[escape]}\nimport time\ntime.sleep(600)"
    lines = (
        "from vcpo_rollout.sandbox import runner",
        *(() if is_wrapped else ("runner.find_bubblewrap = lambda: None",)),
        "runner.isolation()",  # starts children of its own, once
        "print('ready', flush=True)",
        f"runner.run_python({program!r}, runner.SandboxLimits(wall_s=600.0))",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout.readline() == "ready\n"
            program = eventually(lambda: sleeping_program(worker.pid))
        finally:
            worker.send_signal(signal.SIGKILL)
    eventually(lambda: not _status(program) or "State:\tZ" in _status(program))


def sleeping_program(pid):
    """The descendant that has its filter of system calls and sleeps; None before."""
    for child in children_of(pid):
        status = _status(child)
        if "Seccomp:\t2" in status and "State:\tS" in status:
            return child
        if below := sleeping_program(child):
            return below
    return None


def children_of(pid):
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def eventually(condition):
    for _ in range(4000):
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError("it never came true")


def _status(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
