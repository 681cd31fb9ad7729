"""Code is judged by its unit tests, in the sandbox of the Python tool."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

from vcpo_rollout.environments.environment import Prompt
from vcpo_rollout.environments.parameters import parse_limits, parse_sandbox
from vcpo_rollout.sandbox.runner import Sandbox, run_python

_PROGRAM: Final = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_HARNESS: Final = """\
import os
run, read, write, Failure = exec, compile, os.write, BaseException
space, passed = {{"__name__": "solution"}}, 0
try:
    run(read({program!r}, "<solution>", "exec"), space)
except Failure:
    pass
else:
    for test in {tests!r}:
        try:
            run(read(test, "<test>", "exec"), space)
            passed += 1
        except Failure:
            pass
write(1, ("\\n{mark} %d\\n" % passed).encode())
"""
"""The program that runs a solution and its tests. It holds what it calls under names of its own, so
that a solution that replaces `exec` or `print` changes nothing, and says a mark that no solution
can know beforehand, so that one that prints or exits passes no test."""


class UnitTests:
    """1.0 if the response's last fenced program passes all tests of its prompt, else 0.0.

    tests: Key in the prompt's metadata, such as a column of a data set: a text of Python, or a list
        of them; a test passes if it raises nothing.
    partial: Whether the reward is the share of tests passed.
    wall_seconds: Time of the program with all its tests.
    memory_mebibytes, sandbox: As of the environment `python_tool`.

    Raises ValueError, naming the parameter, and when no program can run in the sandbox.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        partial: bool = False,
        wall_seconds: float = 5.0,
        memory_mebibytes: int = 512,
        sandbox: Sandbox = Sandbox.BUBBLEWRAP,
    ) -> None:
        self._tests = tests
        self._partial = partial
        self._limits = parse_limits(wall_seconds, memory_mebibytes)
        self._sandbox = parse_sandbox(sandbox)

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Run the program with its tests.

        Raises: ValueError when the prompt has no tests; SandboxError when no program can run now.
        """
        tests = self._tests_of(prompt)
        programs = _PROGRAM.findall(response)
        if not programs:
            return 0.0
        mark = secrets.token_hex(16)
        source = _HARNESS.format(program=programs[-1], tests=list(tests), mark=mark)
        said = re.findall(
            rf"^{mark} ([0-9]+)$", run_python(source, self._limits, self._sandbox), re.M
        )
        passed = int(said[-1]) if said else 0
        return passed / len(tests) if self._partial else float(passed == len(tests))

    def _tests_of(self, prompt: Prompt) -> Sequence[str]:
        found = prompt.metadata.get(self._tests)
        tests = [found] if isinstance(found, str) else found
        if not isinstance(tests, list) or not tests or not all(isinstance(e, str) for e in tests):
            known = ", ".join(map(repr, prompt.metadata)) or "nothing"
            raise ValueError(
                f"the prompt's metadata has no tests in {self._tests!r}, but {found!r:.80} (it has"
                f" {known}); give the parameter `tests` the column with a text or a list of texts"
            )
        return tests
