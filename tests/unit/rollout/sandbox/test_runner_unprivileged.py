"""The sandbox of a worker without root's rights, and without bubblewrap."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_NOBODY = 65_534
# An interpreter in root's home can be read still, as it can be by who installed it.
_DROP_ROOT = (
    *("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)

_PRELUDE = """
import ctypes, logging, os
from vcpo_rollout.sandbox import runner as sandbox
from vcpo_rollout.sandbox import child as sandbox_child
from vcpo_rollout.sandbox.runner import SandboxLimits, isolation, run_python
logging.basicConfig(format="%(levelname)s %(message)s")
sandbox.find_bubblewrap = lambda: None

def run(source, **limits):
    return run_python(source, SandboxLimits(wall_s=120.0, cpu_s=20, **limits))
"""

NO_NAMESPACES = """
unshare = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
refused = 0x00050000 | 1  # EPERM
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, refused), (0x06, 0, 0, 0x7FFF0000)]
array = (sandbox_child._Instruction * 4)(*(sandbox_child._Instruction(*step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
program = sandbox_child._Filter(4, array)
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
assert libc.unshare(0x10000000) == -1
"""
"""The worker's seccomp profile refuses `unshare`, as that of most pods does."""


@pytest.fixture
def folders():
    """Where the worker's programs get their folders; outside of pytest's own, which root closes."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() == 0:
            os.chown(name, _NOBODY, _NOBODY)
        yield Path(name)


def worker(folders, script):
    """What a worker says that is nobody, or whoever runs the tests."""
    done = subprocess.run(
        [*(_DROP_ROOT if os.geteuid() == 0 else ()), sys.executable, "-c", _PRELUDE + script],
        env={**os.environ, "TMPDIR": str(folders)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_folders_that_a_program_made_without_rights_are_removed(folders):
    program = (
        "import os\nos.mkdir('a')\nos.mkdir('a/b', 0)\nos.mkdir('c', 0o500)\n"
        "open('a/file', 'w').close()\nos.symlink('a', 'link')\nprint('done')"
    )
    said = worker(folders, f"{NO_NAMESPACES}\nprint(run({program!r}))")
    assert said == "done\n"
    assert list(folders.iterdir()) == []


def test_a_program_cannot_lock_the_folder_above_its_own(folders):
    # The folder above belongs to the worker's user too.
    program = "import os\nos.chmod(os.path.dirname(os.getcwd()), 0o500)"
    said = worker(folders, f"{NO_NAMESPACES}\nprint(run({program!r}))")
    assert "PermissionError: [Errno 13] Permission denied" in said
    assert list(folders.iterdir()) == []


LOCK_AFTERWARDS = """
run_child = sandbox._Child.run
def run_and_lock(child, output):
    done = run_child(child, output)
    os.chmod(os.environ["TMPDIR"], 0o500)
    return done
isolation()
sandbox._Child.run = run_and_lock
"""


def test_what_a_program_printed_counts_where_its_folder_cannot_be_removed(folders):
    program = "import os\nprint(os.listdir())"
    again = "os.chmod(os.environ['TMPDIR'], 0o700)"
    runs = f"print(run({program!r}))\n{again}\nprint(run({program!r}))\n"
    left = "print(sandbox.num_folders_left())"
    said = worker(folders, f"{NO_NAMESPACES}{LOCK_AFTERWARDS}\n{runs}{left}")
    folders.chmod(0o700)
    lines = said.splitlines()
    assert lines[:3] == ["[]", "[]", "2"]
    assert [line.rpartition(": [Errno 13]")[0] for line in lines[3:]] == [
        "WARNING sandbox: a program's folder cannot be removed"
    ]
    assert len(list(folders.iterdir())) == 2


NO_MAPS = """
libc = ctypes.CDLL(None)
ruleset = libc.syscall(444, ctypes.byref(ctypes.c_uint64(2)), ctypes.c_size_t(8), 0)
for path in ("/dev", os.environ["TMPDIR"]):
    beneath = sandbox_child._PathBeneath(2, os.open(path, os.O_RDONLY))
    assert libc.syscall(445, ruleset, 1, ctypes.byref(beneath), 0) == 0
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.syscall(446, ruleset, 0) == 0
"""
"""The worker may make namespaces, but neither write in /proc (a user's map) nor mount.

It stands under Landlock, which refuses it both, as AppArmor does where it restricts user
namespaces.
"""


def test_only_the_disk_is_unprotected_where_namespaces_are_granted_and_maps_are_not(folders):
    assert worker(folders, f"{NO_MAPS}\nprint(isolation().missing)") == "('disk',)\n"


def test_a_program_runs_where_namespaces_are_granted_and_maps_are_not(folders):
    program = (
        "import os\nopen('file', 'w').write('kept')\nprint(open('file').read())\n"
        "try: open('/proc/self/uid_map', 'w')\nexcept OSError: print('no map')"
    )
    said = worker(folders, f"{NO_MAPS}\nprint(run({program!r}))")
    assert said == "kept\nno map\n"
    assert list(folders.iterdir()) == []
