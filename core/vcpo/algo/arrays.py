"""Conversion of sequences, numpy arrays and torch tensors to Python numbers.

The mathematics uses Python floats, which are float64. An object with a `tolist` method is read
through that method, whatever its device and dtype. A float32 or bfloat16 number so keeps its exact
value, and this module needs neither numpy nor torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """The method that numpy arrays and torch tensors share."""

    def tolist(self) -> Any:
        """Return the numbers: one number, a list, or nested lists."""
        ...


Scalar = SupportsFloat
"""One number: a Python number, or an array or tensor with one element."""

Vector = Sequence[SupportsFloat] | Array
"""A sequence of scalars, or an array of one dimension."""

Matrix = Sequence[Vector] | Array
"""A sequence of vectors of any lengths, or an array of two dimensions."""


def vector(values: Vector, name: str) -> list[float]:
    """Return the [n] numbers of a vector.

    name: the argument's name, for the error.
    """
    try:
        return [float(value) for value in _items(values)]
    except TypeError as error:
        raise ValueError(f"{name} is {_shape(values)}: give one dimension of numbers") from error


def counts(values: Vector, name: str) -> list[int]:
    """Return the [n] whole numbers of a vector, such as lengths in tokens.

    Raises: as `vector`; ValueError naming the entry if it is not a whole number.
    """
    numbers = vector(values, name)
    for index, number in enumerate(numbers):
        if not number.is_integer():
            raise ValueError(f"{name}[{index}] is {number}: give a whole number")
    return [int(number) for number in numbers]


def matrix(rows: Matrix, name: str) -> list[list[float]]:
    """Return the [rows][n] numbers of a matrix."""
    try:
        return [vector(row, f"{name}[{index}]") for index, row in enumerate(_items(rows))]
    except TypeError as error:
        raise ValueError(f"{name} is {_shape(rows)}: give two dimensions of numbers") from error


def _items(values: Any) -> Iterable[Any]:
    if isinstance(values, (list, tuple)):  # a check against a protocol takes microseconds
        return values
    listed: Iterable[Any] = values.tolist() if isinstance(values, Array) else values
    return iter(listed)


def _shape(values: Any) -> str:
    """Describe the number of dimensions; of a sequence only the first element is examined."""
    listed, dimensions = values.tolist() if isinstance(values, Array) else values, 0
    while isinstance(listed, Sequence) and not isinstance(listed, str):
        dimensions += 1
        listed = listed[0] if listed else None
        listed = listed.tolist() if isinstance(listed, Array) else listed
    return "a single number" if dimensions == 0 else f"of {dimensions} dimensions"
