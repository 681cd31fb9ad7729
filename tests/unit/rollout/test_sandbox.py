"""Programs run in a real child, within its limits; each of these would hurt without one."""

import os
from pathlib import Path

import pytest

from vcpo_rollout.environments import python_tool
from vcpo_rollout.sandbox import SandboxLimits, run_python, unprotected


def run(source, **limits):
    # The wall is far away: on a busy machine a program gets little of its time.
    settings = {"wall_s": 120.0, "cpu_s": 20, **limits}
    return run_python(source, SandboxLimits(**settings))


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


def test_output_without_end_is_cut_in_the_middle():
    said = run("print('a' + 'x' * 10**6 * 5 + 'b')", file_bytes=10_000, output_characters=100)
    assert said.startswith("axx")
    assert len(said) < 200
    assert "File too large" in said or "characters ...]" in said


def test_it_writes_to_its_own_folder_and_finds_it_empty():
    source = "import os\nprint(os.listdir())\nopen('a', 'w').write('1')\nprint(open('a').read())"
    assert run(source) == "[]\n1"


def test_it_writes_nowhere_else(tmp_path):
    tmp_path.chmod(0o777)
    said = run(f"open({str(tmp_path / 'escaped')!r}, 'w')")
    assert "PermissionError" in said
    assert list(tmp_path.iterdir()) == []


def test_files_are_bounded():
    assert "File too large" in run("open('a', 'wb').write(b'x' * 10**6)", file_bytes=1000)


def test_the_folder_is_gone_afterwards():
    folder = run("import os\nprint(os.getcwd())")
    assert not Path(folder).exists()


def test_limits_cannot_be_raised():
    source = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert "not allowed to raise maximum limit" in run(source)


def test_the_workers_secrets_are_out_of_sight(monkeypatch):
    monkeypatch.setenv("VCPO_TOKEN", "secret")
    assert run("import os\nprint('VCPO_TOKEN' in os.environ)") == "False"
    assert "PermissionError" in run("import os\nopen(f'/proc/{os.getppid()}/environ').read()")


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
    assert ("PermissionError" in reads_outside) == ("files" not in unprotected())


def test_a_worker_is_told_what_its_programs_can_reach(monkeypatch, caplog):
    monkeypatch.setattr(python_tool, "unprotected", lambda: ("network",))
    python_tool.PythonTool(seed=0)
    assert "programs be kept from network" in caplog.text


def test_the_standard_library_is_there():
    source = "import decimal, fractions, itertools, json, math, random, statistics\nprint(math.pi)"
    assert run(source) == "3.141592653589793"
