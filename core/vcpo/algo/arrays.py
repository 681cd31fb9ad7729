"""Numbers as callers hold them, read as Python's: sequences, numpy arrays, torch tensors.

The mathematics counts in Python floats, which are float64. Whatever has a `tolist`, on any device
and in any format, is read through it, so that a float32 or bfloat16 number keeps its exact value
and neither library is needed here.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """What numpy arrays and torch tensors share: they know their numbers as nested lists."""

    def tolist(self) -> Any:
        """The numbers as Python's: one, a list, or a list of lists."""
        ...


Scalar = SupportsFloat
"""One number: Python's, or an array or tensor that holds one."""

Vector = Sequence[SupportsFloat] | Array
"""Numbers in a row: a sequence of scalars, or an array of one dimension."""

Matrix = Sequence[Vector] | Array
"""Rows of numbers, of any lengths: a sequence of vectors, or an array of two dimensions."""


def vector(values: Vector, name: str) -> list[float]:
    """[n] numbers of a vector.

    Raises: ValueError with the argument's name when it has another number of dimensions.
    """
    try:
        return [float(value) for value in _items(values)]
    except TypeError as error:
        raise ValueError(f"{name} is {_shape(values)}: give one dimension of numbers") from error


def counts(values: Vector, name: str) -> list[int]:
    """[n] whole numbers of a vector, such as lengths in tokens.

    Raises: ValueError with the argument's name at a part of a number, and as `vector`.
    """
    numbers = vector(values, name)
    for index, number in enumerate(numbers):
        if not number.is_integer():
            raise ValueError(f"{name}[{index}] is {number}: give a whole number")
    return [int(number) for number in numbers]


def matrix(rows: Matrix, name: str) -> list[list[float]]:
    """[rows][n] numbers of a matrix.

    Raises: ValueError with the argument's name when it has another number of dimensions.
    """
    try:
        return [vector(row, f"{name}[{index}]") for index, row in enumerate(_items(rows))]
    except TypeError as error:
        raise ValueError(f"{name} is {_shape(rows)}: give two dimensions of numbers") from error


def _items(values: Any) -> Iterable[Any]:
    listed: Iterable[Any] = values.tolist() if isinstance(values, Array) else values
    return iter(listed)


def _shape(values: Any) -> str:
    """How many dimensions there are, in words; sequences are judged by what stands first."""
    listed, dimensions = values.tolist() if isinstance(values, Array) else values, 0
    while isinstance(listed, Sequence) and not isinstance(listed, str):
        dimensions += 1
        listed = listed[0] if listed else None
        listed = listed.tolist() if isinstance(listed, Array) else listed
    return "a single number" if dimensions == 0 else f"of {dimensions} dimensions"
