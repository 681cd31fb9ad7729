"""What a program cannot do under bubblewrap, tried in real children."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from examples.plugins.python_tool.programs import run
from examples.plugins.python_tool.python_tool import runner
from examples.plugins.python_tool.python_tool.runner import Sandbox, SandboxLimits, child_command

pytestmark = pytest.mark.usefixtures("bubblewrap")

_NOBODY = 65_534
_PACKAGES = Path(runner.__file__).parents[4]


def test_the_standard_library_is_there():
    source = (
        "import asyncio, decimal, fractions, itertools, json, math, random, statistics\n"
        "asyncio.run(asyncio.sleep(0))\nprint(math.pi)"
    )
    assert run(source) == "3.141592653589793"


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
    "content": "open(path).read()",
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


def test_files_outside_stay_as_they_are(file_of_the_programs_user):
    before = file_of_the_programs_user.stat()
    refusals = reasons(f"import os\npath = {str(file_of_the_programs_user)!r}", CHANGES)
    assert refusals == ["FileNotFoundError"] * len(CHANGES)
    assert file_of_the_programs_user.stat() == before
    assert os.listxattr(file_of_the_programs_user) == []


def test_it_writes_nowhere_but_to_its_folder(tmp_path):
    tmp_path.chmod(0o777)
    places = [str(tmp_path / "a"), "/a", "/dev/a", "/usr/a", f"{sys.base_prefix}/a"]
    calls = {str(number): f"open({place!r}, 'w')" for number, place in enumerate(places)}
    gone, *refused = reasons("", calls)
    assert gone == "FileNotFoundError"
    assert set(refused) <= {"PermissionError", "OSError"}  # the latter of a read-only file system
    assert list(tmp_path.iterdir()) == []


def test_a_program_sees_no_file_but_the_interpreters_and_no_other_process():
    places = ["/proc", "/sys", "/etc/passwd", "/usr/bin", "/dev/shm", __file__]
    exist = f"[path for path in {places} if os.path.exists(path)]"
    interpreter = Path(sys.base_prefix)
    own = [path for path in places if interpreter in (Path(path), *Path(path).parents)]
    assert run(f"import os\nprint({exist}, os.getpid())") == f"{own} 2"


def test_files_together_are_bounded():
    source = "for i in range(64): open(f'{i}', 'wb').write(bytes(1 << 20))"
    said = run(source, disk_bytes=8 << 20)
    assert said.endswith("OSError: [Errno 28] No space left on device")


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
    "owner_of_a_socket": "fcntl.ioctl(pair[0], 0x8901, struct.pack('i', pid))",
}


def test_other_processes_are_none_to_a_program(process_of_the_programs_user):
    pid = process_of_the_programs_user
    prelude = (
        f"import fcntl, os, resource, socket, struct\npid = {pid}\n"
        "pipe = os.pipe()[0]\npair = socket.socketpair()"
    )
    assert reasons(prelude, INTRUSIONS) == ["ProcessLookupError"] * len(INTRUSIONS)
    assert "State:\tS" in _status(pid)


def test_a_program_has_no_capability():
    # capget: of the caller; its effective, permitted and inheritable rights.
    source = (
        "import ctypes\nheader = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "rights = (ctypes.c_uint32 * 6)()\n"
        "print(ctypes.CDLL(None).capget(header, rights), *rights)"
    )
    assert run(source) == "0 0 0 0 0 0 0"


def test_no_network_device_is_up_but_its_own_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        calls = {
            "worker": f"socket.create_connection(('127.0.0.1', {port}), timeout=60)",
            "world": "socket.create_connection(('192.0.2.1', 9), timeout=60)",
        }
        assert reasons("import socket", calls) == ["ConnectionRefusedError", "OSError"]


def test_the_sockets_of_others_are_out_of_reach(tmp_path):
    tmp_path.chmod(0o777)
    path = tmp_path / "worker.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(path))
        server.listen()
        path.chmod(0o777)
        abstract.bind("\0vcpo-test-of-the-sandbox")
        abstract.listen()
        connect = "socket.socket(socket.AF_UNIX).connect"
        calls = {
            "path": f"{connect}({str(path)!r})",
            "abstract": f"{connect}('\\0vcpo-test-of-the-sandbox')",
        }
        refusals = reasons("import socket", calls)
        assert refusals == ["FileNotFoundError", "ConnectionRefusedError"]


def test_no_shared_memory_stays_behind():
    before = Path("/proc/sysvipc/shm").read_text()
    source = "import ctypes\nprint(ctypes.CDLL(None).shmget(0x5c90, 1 << 20, 0o1666) >= 0)"
    assert run(source) == "True"  # its own, which ends with it
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_the_workers_keys_are_out_of_reach():
    said = run(f"open('/proc/{os.getpid()}/environ').read()")
    assert said.splitlines()[-1].startswith("FileNotFoundError")


def test_a_worker_without_roots_rights_runs_programs_too():
    """As in the images: bubblewrap makes a user namespace first."""
    user = _NOBODY if os.geteuid() == 0 else None
    # An interpreter in root's home is closed to others.
    python = sys.executable if user is None else "/usr/bin/python3"
    script = (
        "from examples.plugins.python_tool.python_tool.runner import *\nprint(run_python("
        "'import decimal, os; print(os.getpid())', SandboxLimits(wall_s=120), Sandbox.BUBBLEWRAP))"
    )
    if not Path(python).exists():
        pytest.skip("no interpreter that nobody may start")
    done = subprocess.run(
        [python, "-B", "-c", script],
        env={"PYTHONPATH": str(_PACKAGES), "PATH": os.environ["PATH"]},
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout + done.stderr == "2\n"


def test_a_program_does_not_begin_after_its_workers_death(tmp_path):
    of_worker, of_child = socket.socketpair()
    with of_child:
        of_worker.close()
        done = subprocess.run(
            child_command(SandboxLimits(), Sandbox.BUBBLEWRAP, of_child.fileno()),
            input=b"print('begun')",
            stdout=subprocess.PIPE,
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
def test_a_program_ends_with_the_worker_that_is_killed(escape):
    program = f"{ESCAPES[escape]}\nimport time\ntime.sleep(600)"
    lines = (
        "from examples.plugins.python_tool.python_tool.runner import *",
        f"run_python({program!r}, SandboxLimits(wall_s=600.0), Sandbox.BUBBLEWRAP)",
    )
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)]) as worker:
        try:
            program = eventually(lambda: sleeping_program(worker.pid))
        finally:
            worker.send_signal(signal.SIGKILL)
    eventually(lambda: not _status(program) or "State:\tZ" in _status(program))


def sleeping_program(pid):
    """The descendant that has its limits and sleeps; None before."""
    for child in children_of(pid):
        if "State:\tS" in _status(child) and has_limits(child):
            return child
        if below := sleeping_program(child):
            return below
    return None


def has_limits(pid):
    try:
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(line.split()[:3] == ["Max", "processes", "0"] for line in limits)


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
