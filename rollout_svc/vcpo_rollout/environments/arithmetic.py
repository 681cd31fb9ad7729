"""Evaluates a model's arithmetic exactly, without running it as Python.

The text is untrusted: `eval` would compute `9**9**9` for hours and execute `__import__('os')`. This
module bounds the length before Python's parser sees the text, and accepts only five kinds of syntax
nodes. With bounded length and without powers every number is bounded, so no response is slow.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_CHARACTERS: Final = 256
"""Longest expression that is evaluated; ten numbers of 20 digits fit."""

MAX_DEPTH: Final = 64

_ALLOWED: Final = re.compile(r"[0-9+\-*/(). ]+")

_BINARY: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculation:
    """The value of an expression, and the integers in it, in reading order."""

    value: Fraction
    numbers: tuple[int, ...]


class _UnsupportedError(Exception):
    """The expression contains unsupported syntax."""


def calculate(expression: str) -> Calculation | None:
    """Return the exact value and the numbers of an expression of integers, + - * / and parentheses.

    Signs (`-3`, `2--1`) have their usual meaning. Returns None, and never raises, for everything
    else: powers, `//`, decimals, `3(4)`, leading zeros, division by zero, characters outside
    `0-9 + - * / ( ) . space` (so no digit of another script), and text beyond `MAX_CHARACTERS` or
    `MAX_DEPTH`.
    """
    if len(expression) > MAX_CHARACTERS or not _ALLOWED.fullmatch(expression):
        return None
    numbers: list[int] = []
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body, numbers, MAX_DEPTH)
    except (SyntaxError, ZeroDivisionError, _UnsupportedError):
        return None
    return Calculation(value=value, numbers=tuple(numbers))


def _value(node: ast.expr, numbers: list[int], depth_left: int) -> Fraction:
    if depth_left == 0:
        raise _UnsupportedError
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers, depth_left - 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers, depth_left - 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first = _value(left, numbers, depth_left - 1)
            second = _value(right, numbers, depth_left - 1)
            return _BINARY[type(op)](first, second)
        case _:
            raise _UnsupportedError
