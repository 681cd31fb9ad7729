"""Code is run with its tests, in the sandbox."""

from __future__ import annotations

import pytest

from tests.fixtures.rollout.sandbox import best_sandbox
from vcpo_rollout.environments import Prompt
from vcpo_rollout.environments.rewards.unit_tests import UnitTests

TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
PROMPT = Prompt(text="?", metadata={"tests": TESTS})


def reward_of(program, prompt=PROMPT, **parameters):
    judge = UnitTests(wall_seconds=120, sandbox=best_sandbox(), **parameters)
    return judge(prompt, f"Here it is.\n```python\n{program}\n```\nDone.")


def test_a_program_that_passes_all_tests_is_right():
    assert reward_of("def double(x):\n    print('{x}')\n    return 2 * x") == 1.0


def test_tests_may_be_one_text():
    prompt = Prompt(text="?", metadata={"check": "\n".join(TESTS)})
    assert reward_of("def double(x): return x + x", prompt, tests="check") == 1.0


def test_some_tests_count_where_the_run_says_so():
    program = "def double(x): return 4"
    assert [reward_of(program, partial=partial) for partial in (False, True)] == [0.0, 0.5]


@pytest.mark.parametrize(
    "program",
    [
        "def double(x): raise SystemExit(0)",
        "import os\ndef double(x): os._exit(0)",
        "raise SystemExit(0)",
        "import builtins\nbuiltins.exec = builtins.print = lambda *_: None",
        "def double(x:",
        "",
    ],
)
def test_a_program_that_ends_or_prints_or_replaces_what_runs_it_passes_no_test(program):
    assert reward_of(program) == 0.0


SUM = Prompt(
    text="?",
    metadata={
        "tests": [{"input": "1 2\n", "output": "3"}, {"input": "4\n5 6\n", "output": "4\n11\n"}]
    },
)
READS = "import sys\nfor line in sys.stdin.buffer:\n    print(sum(map(int, line.split())), '')"
ENDS = """\
import sys
def main():
    while True:
        try:
            print(sum(map(int, input().split())))
        except EOFError:
            sys.exit()
if __name__ == '__main__':
    main()
"""


@pytest.mark.parametrize(
    ("program", "share"),
    [(READS, 1.0), (ENDS, 1.0), ("print(3)", 0.5), ("print(3)\nraise SystemExit(1)", 0.0)],
)
def test_a_program_that_reads_and_prints_is_run_for_each_input(program, share):
    assert reward_of(program, SUM, partial=True) == share


def test_a_list_may_have_tests_of_both_kinds():
    tests = [*TESTS, {"input": "7", "output": "14"}]
    program = "double = lambda x: 2 * x\nif __name__ == '__main__': print(double(int(input())))"
    assert reward_of(program, Prompt(text="?", metadata={"tests": tests})) == 1.0


def test_a_response_without_a_program_is_wrong():
    assert UnitTests(sandbox=best_sandbox())(PROMPT, "def double(x): return 2 * x") == 0.0


def test_a_prompt_without_tests_is_told_with_what_it_has():
    prompt = Prompt(text="?", metadata={"test": "assert True"})
    with pytest.raises(ValueError, match=r"no tests in 'tests', but None \(it has 'test'\)"):
        reward_of("", prompt)


def test_a_bad_parameter_is_named():
    with pytest.raises(ValueError, match=r"environment\.parameters\.sandbox: 'jail' is unknown"):
        UnitTests(sandbox="jail")
