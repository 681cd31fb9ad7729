"""Programs run in a real child process, within its limits, whatever the sandbox is."""

import os

import pytest

from examples.plugins.python_tool.programs import run
from examples.plugins.python_tool.python_tool import runner
from examples.plugins.python_tool.python_tool.runner import Sandbox, SandboxError, check_sandbox
from examples.plugins.python_tool.python_tool.task import PythonTool


def test_what_a_program_prints_comes_back(sandbox):
    assert run("print(17 * 23)\nprint('ü')", sandbox) == "391\nü"


def test_a_program_that_prints_nothing_gives_nothing(sandbox):
    assert run("x = 1", sandbox) == ""


def test_an_exception_is_shown_with_its_line_and_none_of_ours(sandbox):
    said = run("print('so far')\n\n1 / 0", sandbox)
    assert said == (
        "so far\nTraceback (most recent call last):\n"
        '  File "<program>", line 3, in <module>\nZeroDivisionError: division by zero'
    )


def test_what_is_no_python_is_a_syntax_error(sandbox):
    assert "SyntaxError" in run("print(", sandbox)


def test_a_program_may_end_itself(sandbox):
    assert run("import sys\nsys.exit('enough')", sandbox) == "enough"


def test_an_endless_loop_ends_with_its_cpu_time(sandbox):
    said = run("while True: pass", sandbox, cpu_s=1)
    assert said == "[stopped: used more than 1 s of CPU time]"


def test_a_sleeper_ends_with_the_time_on_the_wall(sandbox):
    said = run("import time\nwhile True: time.sleep(1)", sandbox, wall_s=0.5)
    assert said == "[stopped: still running after 0.5 s]"


def test_a_memory_hog_gets_an_error(sandbox):
    assert run("x = [0] * 10**10", sandbox).endswith("MemoryError")


@pytest.mark.parametrize(
    "call",
    ["os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "_thread.start_new_thread(abs, ())"],
    ids=["a fork", "another program", "a thread"],
)
def test_there_are_no_further_processes_or_threads(sandbox, call):
    said = run(f"import _thread, os\n{call}\nprint('escaped')", sandbox)
    refusals = ("Resource temporarily unavailable", "can't start new thread", "'/bin/true'")
    assert said.endswith(refusals)


def test_output_without_end_is_truncated_in_the_middle(sandbox):
    source = "print('a' + 'x' * 10**6 * 5 + 'b')"
    said = run(source, sandbox, file_bytes=10_000, output_characters=100)
    assert said.startswith("axx")
    assert len(said) < 200
    assert "File too large" in said or "characters ...]" in said


def test_it_writes_to_its_own_folder_and_finds_it_empty(sandbox):
    source = "import os\nprint(os.listdir())\nopen('a', 'w').write('1')\nprint(open('a').read())"
    assert run(source, sandbox) == "[]\n1"


def test_files_are_bounded(sandbox):
    source = "open('a', 'wb').write(b'x' * 10**6)"
    assert "File too large" in run(source, sandbox, file_bytes=1000)


def test_a_folder_is_gone_afterwards_however_deep_it_is(sandbox, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(runner.tempfile, "tempdir", str(tmp_path))
    source = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nprint('deep')"
    assert run(source, sandbox) == "deep"
    assert list(tmp_path.iterdir()) == []


def test_limits_cannot_be_raised(sandbox):
    source = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert "not allowed to raise maximum limit" in run(source, sandbox)


def test_a_program_may_read_and_lower_its_own_limits(sandbox):
    source = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run(source, sandbox) == "(9, 9)"


def test_the_workers_environment_is_none_of_the_programs(sandbox, monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret")
    names = "sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})"
    assert run(f"import os\nprint({names})", sandbox) == "['HOME', 'LANG', 'TMPDIR']"


def test_a_signal_without_a_name_that_ends_a_program_is_told_by_its_number(sandbox):
    assert run("import os\nos.kill(os.getpid(), 35)", sandbox) == "[stopped: signal 35]"
    assert run("import os\nos.kill(os.getpid(), 11)", sandbox) == "[stopped: SIGSEGV]"


def test_a_program_that_cannot_be_started_is_no_output_of_the_program(refused_bubblewrap):
    with pytest.raises(SandboxError, match="cannot run: bwrap: Creating new namespace failed"):
        run("print(1)")


def test_where_bubblewrap_is_refused_the_task_is_refused_with_field_reason_and_cure(
    refused_bubblewrap,
):
    with pytest.raises(ValueError, match="sandbox: 'bubblewrap' runs no program") as refused:
        PythonTool(seed=0)
    said = str(refused.value)
    assert said.startswith("environment.parameters.sandbox: ")
    assert "(sandbox: a program cannot run: bwrap: Creating new namespace failed); inst" in said
    assert "runtimeClassName" in said
    assert "`sandbox: pod`" in said


def test_where_bubblewrap_is_missing_the_task_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.shutil, "which", lambda name: str(tmp_path / name))
    check_sandbox.cache_clear()
    with pytest.raises(ValueError, match=r"No such file .*/bwrap'.*install bubblew"):
        PythonTool(seed=0)


def test_where_the_pod_is_the_sandbox_programs_run_without_bubblewrap(refused_bubblewrap, caplog):
    task = PythonTool(seed=0, sandbox="pod", wall_seconds=120)
    assert task.run("print(1)") == "1"
    assert "programs can reach the worker's keys, files and network" in caplog.text


def test_another_sandbox_is_refused_with_those_that_there_are():
    message = "environment.parameters.sandbox: 'docker' is unknown; use one of bubblewrap, pod"
    with pytest.raises(ValueError, match=message):
        PythonTool(seed=0, sandbox="docker")


def test_a_first_program_that_says_something_else_is_no_sandbox(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text("raise OSError('no such thing')")
    monkeypatch.setattr(runner, "_CHILD", child)
    check_sandbox.cache_clear()
    with pytest.raises(SandboxError, match="a program cannot run: OSError: no such thing"):
        check_sandbox(Sandbox.POD)


def test_a_program_of_a_worker_that_is_root_is_nobodys(sandbox):
    assert run("import os\nprint(os.getuid())", sandbox) == str(os.getuid() or 65_534)
