"""Checks a task's parameters, as read from YAML, and converts them to typed values."""

from enum import StrEnum


class Style(StrEnum):
    """The wording of a prompt."""

    PLAIN = "plain"
    """A bare formula, for a character-level model that was trained on nothing else."""

    INSTRUCT = "instruct"
    """A sentence with the task and the way to mark the answer, for an instruct model."""


def parse_style(value: object) -> Style:
    """Return the style of that name; raise ValueError with the known names otherwise."""
    if value not in tuple(Style):
        raise ValueError(
            f"environment.parameters.style: {value!r} is unknown; use one of {', '.join(Style)}"
        )
    return Style(str(value))


def parse_integer(field: str, value: object, *, lowest: int, highest: int) -> int:
    """Return an integer within [lowest, highest]; raise ValueError naming the field otherwise."""
    # Python treats bool as int, and `digits: true` in a YAML file is a mistake.
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is not an integer "
            f"from {lowest} to {highest}"
        )
    return value


def parse_span(field: str, value: object, *, lowest: int, highest: int) -> tuple[int, int]:
    """Return (smallest, largest), both inclusive, from a pair or from one number.

    Raises ValueError, naming the field, unless lowest <= smallest <= largest <= highest.
    """
    ends = (value, value) if isinstance(value, int) else value
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is neither an integer "
            "nor a pair [smallest, largest]"
        )
    smallest, largest = (parse_integer(field, end, lowest=lowest, highest=highest) for end in ends)
    if smallest > largest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is empty; "
            "put the smaller number of the pair first"
        )
    return smallest, largest


def parse_path(value: object) -> str | None:
    """Return the path of a data set, or None; raise ValueError if it is not a text."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(
            f"environment.parameters.path: {value!r} is not a path; "
            "give a .jsonl or .parquet file or a folder, or remove it to load from the hub"
        )
    return value
