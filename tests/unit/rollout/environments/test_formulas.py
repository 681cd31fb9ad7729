"""Answers that sympy's parser gets to evaluate, and those that it does not."""

import pytest
from sympy import parse_expr

from vcpo_rollout.environments.reasoning_gym.judge_process import is_formula


@pytest.mark.parametrize(
    "answer",
    [
        "(3 + 4)*2.5 - 1e3/7",
        "24",
        "3! * 4",
        "-x**3/3 + C",
        "log(x + 1)*sin(2*x) - sqrt(x)*exp(-x) + E",
        "2*y**2 + y_1*alpha",
        "Rational(1, 3)*Abs(x) + abs(gamma(4) - pi)",
    ],
)
def test_numbers_variables_and_functions_are_a_formula(answer):
    assert is_formula(answer)
    parse_expr(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "open('/tmp/a', 'w')",
        "exec(chr(112) + chr(97))",
        "__import__(x)",
        "sin.__init__",
        "(1) . real",
        "print(1)",
        "exit(1)",
        "sympify(x)",
        "S(x)",
        "Symbol(x)",
        "Lambda(x, x)",
        "preview(x)",
        "lambdify(x, x)",
        "[x for x in (1, 2)]",
        "lambda: x",
        "\uff45\uff58\uff45\uff43(x)",
        "x\\\n.y",
        "x; y",
        "2 \xd7 3",
    ],
)
def test_what_could_call_anything_else_is_none(answer):
    assert not is_formula(answer)
