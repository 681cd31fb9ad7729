"""Programs run in a real child process, within its limits."""

import os
import socket
from pathlib import Path

import pytest

from tests.fixtures.rollout.sandbox import run
from vcpo.metrics import RolloutMetrics
from vcpo.metrics.label_values import SandboxMechanism
from vcpo_rollout.environments import python_tool
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.sandbox import runner as sandbox
from vcpo_rollout.sandbox.runner import (
    PROTECTIONS,
    Isolation,
    isolation,
    remove_folder,
)


def test_what_a_program_prints_comes_back():
    assert run("print(17 * 23)\nprint('ü')") == "391\nü"


def test_a_program_that_prints_nothing_gives_nothing():
    assert run("x = 1") == ""


def test_an_exception_is_shown_with_its_line_and_none_of_ours():
    said = run("print('so far')\n\n1 / 0")
    assert said == (
        "so far\nTraceback (most recent call last):\n"
        '  File "<program>", line 3, in <module>\nZeroDivisionError: division by zero'
    )


def test_what_is_no_python_is_a_syntax_error():
    assert "SyntaxError" in run("print(")


def test_a_program_may_end_itself():
    assert run("import sys\nsys.exit('enough')") == "enough"


def test_an_endless_loop_ends_with_its_cpu_time():
    assert run("while True: pass", cpu_s=1) == "[stopped: used more than 1 s of CPU time]"


def test_a_sleeper_ends_with_the_time_on_the_wall():
    said = run("import time\nwhile True: time.sleep(1)", wall_s=0.5)
    assert said == "[stopped: still running after 0.5 s]"


def test_a_memory_hog_gets_an_error():
    assert run("x = [0] * 10**10").endswith("MemoryError")


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfor _ in range(100): os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import threading\nthreading.Thread(target=print).start()",
    ],
    ids=["fork bomb", "another program", "thread"],
)
def test_there_are_no_further_processes_or_threads(source):
    said = run(f"{source}\nprint('escaped')")
    assert said.endswith(("Resource temporarily unavailable", "can't start new thread"))


def test_output_without_end_is_truncated_in_the_middle():
    said = run("print('a' + 'x' * 10**6 * 5 + 'b')", file_bytes=10_000, output_characters=100)
    assert said.startswith("axx")
    assert len(said) < 200
    assert "File too large" in said or "characters ...]" in said


def test_it_writes_to_its_own_folder_and_finds_it_empty():
    source = "import os\nprint(os.listdir())\nopen('a', 'w').write('1')\nprint(open('a').read())"
    assert run(source) == "[]\n1"


def test_it_writes_nowhere_else(system, tmp_path):
    tmp_path.chmod(0o777)
    said = run(f"open({str(tmp_path / 'escaped')!r}, 'w')")
    assert said.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))
    assert list(tmp_path.iterdir()) == []


def test_files_are_bounded():
    assert "File too large" in run("open('a', 'wb').write(b'x' * 10**6)", file_bytes=1000)


def test_the_folder_is_gone_afterwards():
    folder = run("import os\nprint(os.getcwd())")
    assert not Path(folder).exists()


def test_limits_cannot_be_raised():
    source = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert "not allowed to raise maximum limit" in run(source)


def test_the_workers_secrets_are_out_of_sight(system, monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret")
    assert run("import os\nprint('VCPO_WORKER_KEY' in os.environ)") == "False"
    said = run(f"open('/proc/{os.getpid()}/environ').read()")
    assert said.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))


def test_it_cannot_signal_the_worker():
    assert "PermissionError" in run(f"import os\nos.kill({os.getpid()}, 0)")


def test_there_is_no_network():
    source = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=60)"
    assert run(source).splitlines()[-1] in {
        "PermissionError: [Errno 13] Permission denied",
        "OSError: [Errno 101] Network is unreachable",
    }


def test_what_the_system_refuses_is_known_before_a_program_runs():
    # A file outside is out of sight exactly where files are not among what is refused.
    reads_outside = run("print(open('/etc/hostname').read())")
    assert ("Error: [Errno" in reads_outside) == ("files" not in isolation().missing)


def test_a_worker_logs_what_isolates_its_programs_and_what_they_can_reach(monkeypatch, caplog):
    how = Isolation(mechanism=SandboxMechanism.FILTERS, missing=("network",))
    monkeypatch.setattr(python_tool, "isolation", lambda: how)
    with caplog.at_level("INFO"):
        python_tool.PythonTool(seed=0)
    assert "programs are isolated by filters" in caplog.text
    assert "not isolate programs from network" in caplog.text


def test_the_standard_library_is_there():
    source = "import decimal, fractions, itertools, json, math, random, statistics\nprint(math.pi)"
    assert run(source) == "3.141592653589793"


def test_a_system_on_which_no_program_starts_is_reported_with_the_reason(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text("raise OSError('no such thing')")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    isolation.cache_clear()
    with pytest.raises(OSError, match="cannot run on this system: OSError: no such thing"):
        isolation()


def test_the_sockets_of_others_are_out_of_reach(system, tmp_path):
    tmp_path.chmod(0o777)
    path = tmp_path / "worker.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(path))
        server.listen()
        path.chmod(0o777)
        abstract.bind("\0vcpo-test-of-the-sandbox")
        abstract.listen()
        for address in (str(path), "\0vcpo-test-of-the-sandbox"):
            source = f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})\nprint(1)"
            assert run(source).endswith("PermissionError: [Errno 13] Permission denied")


def test_a_pair_of_its_own_sockets_works(system):
    source = "import socket\na, b = socket.socketpair()\na.send(b'hi')\nprint(b.recv(2))"
    assert run(source) == "b'hi'"


def test_no_shared_memory_stays_behind(system):
    before = Path("/proc/sysvipc/shm").read_text()
    source = "import ctypes\nprint(ctypes.CDLL(None).shmget(0x5c90, 1 << 20, 0o1666))"
    assert run(source) == "-1"
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_folders_deeper_than_python_calls_are_removed(system):
    source = "import os\nprint(os.getcwd(), flush=True)\nfor _ in range(1200): "
    said = run(f"{source}os.mkdir('d'); os.chdir('d')").splitlines()
    assert not Path(said[0]).exists()


def test_folders_deeper_than_any_path_are_removed(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    deepest = os.open(folder, os.O_RDONLY)
    for _ in range(25):  # 5,000 characters, where a path has 4,096 at most
        os.mkdir("d" * 200, dir_fd=deepest)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=deepest)
        os.close(deepest)
        deepest = deeper
    os.close(deepest)
    remove_folder(str(folder))
    assert list(tmp_path.iterdir()) == []


def test_files_together_are_bounded(system):
    source = "import time\nfor i in range(64): open(f'{i}', 'wb').write(bytes(1 << 20))"
    said = run(f"{source}\ntime.sleep(60)\nprint('kept')", disk_bytes=8 << 20)
    if "disk" in isolation().missing:
        assert said == "[stopped: its files exceed 8,388,608 bytes]"
    else:
        assert said.endswith("OSError: [Errno 28] No space left on device")


def test_more_bytes_or_files_than_a_program_may_have_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_MAX_FILES", 10)
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert not sandbox._is_larger(str(tmp_path), 1 << 20)
    assert sandbox._is_larger(str(tmp_path), 1 << 16)
    for number in range(sandbox._MAX_FILES):
        (tmp_path / str(number)).touch()
    assert sandbox._is_larger(str(tmp_path), 1 << 20)


def test_a_folder_is_removed_with_links_and_what_may_not_be_read(tmp_path):
    kept = tmp_path / "kept"
    kept.touch()
    folder = tmp_path / "folder"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(kept)
    (folder / "a" / "b").chmod(0)
    (folder / "up").symlink_to(tmp_path)
    remove_folder(str(folder))
    assert list(tmp_path.iterdir()) == [kept]


def test_what_programs_are_not_kept_from_is_a_metric():
    metrics = RolloutMetrics(run="run", group="main")
    how = Isolation(mechanism=SandboxMechanism.NAMESPACES, missing=("disk", "shared memory"))
    RolloutGauges(metrics).watch_sandbox(how)
    labels = {"run": "run", "group": "main"}
    missing = {
        protection: metrics.registry.get_sample_value(
            "vcpo_rollout_sandbox_missing", {**labels, "protection": protection}
        )
        for protection in (one.replace(" ", "_") for one in PROTECTIONS)
    }
    assert [name for name, value in missing.items() if value == 1.0] == ["shared_memory", "disk"]
    assert [name for name, value in missing.items() if value == 0.0] == [
        *("network", "files", "sockets", "processes")
    ]


def test_what_isolates_programs_is_a_metric():
    metrics = RolloutMetrics(run="run", group="main")
    how = Isolation(mechanism=SandboxMechanism.BUBBLEWRAP, missing=())
    RolloutGauges(metrics).watch_sandbox(how)
    acts = {
        mechanism: metrics.registry.get_sample_value(
            "vcpo_rollout_sandbox_mechanism",
            {"run": "run", "group": "main", "mechanism": mechanism},
        )
        for mechanism in ("bubblewrap", "namespaces", "filters")
    }
    assert acts == {"bubblewrap": 1, "namespaces": 0, "filters": 0}


def test_folders_that_stay_are_a_metric(monkeypatch):
    metrics = RolloutMetrics(run="run", group="main")
    name, labels = "vcpo_rollout_sandbox_folders_left", {"run": "run", "group": "main"}
    assert metrics.registry.get_sample_value(name, labels) is None
    how = Isolation(mechanism=SandboxMechanism.FILTERS, missing=())
    RolloutGauges(metrics).watch_sandbox(how)
    assert metrics.registry.get_sample_value(name, labels) == 0
    monkeypatch.setattr(sandbox, "_FOLDERS_LEFT", {"/tmp/a", "/tmp/b"})
    assert metrics.registry.get_sample_value(name, labels) == 2
