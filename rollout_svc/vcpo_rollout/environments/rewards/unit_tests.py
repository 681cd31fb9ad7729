"""Code is judged by its unit tests, in the sandbox of the Python tool."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vcpo_rollout.environments.environment import Prompt
from vcpo_rollout.environments.parameters import parse_limits, parse_sandbox
from vcpo_rollout.sandbox.runner import Sandbox, run_python

_PROGRAM: Final = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_HARNESS: Final = """\
import io, os, sys
run, read, write, Failure, Exit = exec, compile, os.write, BaseException, SystemExit
Text, Bytes, pairs, texts, passed = io.TextIOWrapper, io.BytesIO, {pairs!r}, {texts!r}, 0


def printed(program, given):
    output = Bytes()
    sys.stdin, sys.stdout = Text(Bytes(given.encode())), Text(output, write_through=True)
    try:
        run(program, {{"__name__": "__main__"}})
    except Exit as end:
        if end.code:
            raise
    return [line.rstrip() for line in output.getvalue().decode().rstrip().split("\\n")]


try:
    program, space = read({program!r}, "<solution>", "exec"), {{"__name__": "solution"}}
    if texts:
        run(program, space)
except Failure:
    pairs = texts = ()
for test in texts:
    try:
        run(read(test, "<test>", "exec"), space)
        passed += 1
    except Failure:
        pass
for given, wanted in pairs:
    try:
        passed += printed(program, given) == wanted
    except Failure:
        pass
write(1, ("\\n{mark} %d\\n" % passed).encode())
"""
"""The program that runs a solution and its tests. It holds what it calls under names of its own, so
that a solution that replaces `exec` or `print` changes nothing, and says a mark that no solution
can know beforehand, so that one that prints or exits passes no test."""


class UnitTests:
    """1.0 if the response's last fenced program passes all tests of its prompt, else 0.0.

    tests: Key in the prompt's metadata, such as a column of a data set: a test, or a list of them.
        A text of Python passes if it raises nothing. A mapping of `input` and `output` passes if
        the program, run as a script that reads the one, prints the other; spaces at the end of
        lines and empty lines at the end do not count.
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
        source = _HARNESS.format(
            program=programs[-1],
            texts=[test for test in tests if isinstance(test, str)],
            pairs=[_pair(test) for test in tests if not isinstance(test, str)],
            mark=mark,
        )
        said = re.findall(
            rf"^{mark} ([0-9]+)$", run_python(source, self._limits, self._sandbox), re.M
        )
        passed = int(said[-1]) if said else 0
        return passed / len(tests) if self._partial else float(passed == len(tests))

    def _tests_of(self, prompt: Prompt) -> Sequence[str | Mapping[str, str]]:
        found = prompt.metadata.get(self._tests)
        tests: list[Any] = found if isinstance(found, list) else [found]
        if not tests or not all(map(_is_test, tests)):
            known = ", ".join(map(repr, prompt.metadata)) or "nothing"
            raise ValueError(
                f"the prompt's metadata has no tests in {self._tests!r}, but {found!r:.80} (it has"
                f" {known}); give the parameter `tests` the column with a test or a list of tests,"
                " each a text of Python or a mapping of `input` and `output`"
            )
        return tests


def _is_test(test: object) -> bool:
    if isinstance(test, Mapping):
        return all(isinstance(test.get(name), str) for name in ("input", "output"))
    return isinstance(test, str)


def _pair(test: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the input, and the lines to print."""
    return test["input"], [line.rstrip() for line in test["output"].rstrip().split("\n")]
