"""A reward for programs: the share of its prompt's tests that a response's program passes.

    vcpo run examples/programs.yaml

A column of the data set, `tests`, holds Python texts, each of which raises if it fails. Each test
runs with the program in a process of its own, with limits on time, memory and files.
The limits stop a bad program, not a hostile one: before a model writes programs in a cluster, give
the workers' pods a sandboxed `runtimeClassName`, or see `examples/plugins/python_tool`.
"""

import re
import secrets
import subprocess
import sys
import tempfile

from vcpo_rollout.environments import Prompt

PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
LIMITS = """\
import resource as r
for kind, most in ((r.RLIMIT_AS, 512 << 20), (r.RLIMIT_FSIZE, 1 << 20), (r.RLIMIT_CPU, {seconds})):
    r.setrlimit(kind, (most, most))
del r, kind, most
"""


def passed(prompt: Prompt, response: str, seconds: int = 5) -> float:
    """Return the share of tests passed, in [0, 1]; 0 without a program in a fenced block.

    seconds: Time of each test.
    """
    tests = prompt.metadata["tests"]
    programs = PROGRAM.findall(response)
    if not programs:
        return 0.0
    return sum(passes(f"{programs[-1]}\n{test}", seconds) for test in tests) / len(tests)


def passes(source: str, seconds: int) -> bool:
    """Run a program; only one that reaches its last line passes, so `exit()` does not."""
    end = secrets.token_hex()
    text = f"{LIMITS.format(seconds=seconds)}\n{source}\nprint('{end}')"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-I", "-c", text]
        try:
            subprocess.run(  # noqa: S603 - its purpose
                command,
                cwd=folder,
                env={},  # none of the worker's keys
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=True,
            )
        except subprocess.SubprocessError:
            return False
        output.seek(0)
        return output.read().decode(errors="replace").endswith(f"{end}\n")
