"""The reward of `examples/run_tests.py`: only programs that pass score."""

import pytest

from examples.run_tests import passed
from vcpo_rollout.environments import Prompt

PROMPT = Prompt(text="double", metadata={"tests": ["assert f(2) == 4", "assert f(-1) == -2"]})


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def f(x): return 2 * x", 1.0),
        ("def f(x): return 4", 0.5),
        ("def f(x): return x", 0.0),
        ("def f(x): exit(0)", 0.0),
        ("print('passed'); exit()", 0.0),
        ("def f(x): return [0] * 10**10", 0.0),
        ("open('a', 'wb').write(b'x' * 2**21)\ndef f(x): return 2 * x", 0.0),
        ("def f(", 0.0),
    ],
)
def test_the_reward_is_the_share_of_tests_passed(program, reward):
    assert passed(PROMPT, f"See:\n```python\n{program}\n```", seconds=60) == reward


def test_a_program_that_never_ends_fails_when_its_time_is_over():
    assert passed(PROMPT, "```python\nwhile True: pass\n```", seconds=1) == 0.0


def test_a_response_without_a_program_scores_nothing():
    assert passed(PROMPT, "def f(x): return 2 * x") == 0.0
