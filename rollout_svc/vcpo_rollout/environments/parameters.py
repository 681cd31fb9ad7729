"""Checks parameters of a task, as read from YAML, and converts them; errors name the field."""

from enum import StrEnum


class Style(StrEnum):
    """The wording of a prompt: a bare formula, or a sentence for an instruct model."""

    PLAIN = "plain"
    INSTRUCT = "instruct"


def parse_style(value: object) -> Style:
    """Return the style of that name."""
    if value not in tuple(Style):
        known = ", ".join(Style)
        raise ValueError(f"environment.parameters.style: {value!r} is unknown; use one of {known}")
    return Style(str(value))


def parse_integer(field: str, value: object, *, lowest: int, highest: int) -> int:
    """Return an integer within [lowest, highest]."""
    # Python treats bool as int, and `digits: true` in a YAML file is a mistake.
    if type(value) is not int or not lowest <= value <= highest:
        wanted = f"an integer from {lowest} to {highest}"
        raise ValueError(f"environment.parameters.{field}: {value!r} is not {wanted}")
    return value


def parse_span(field: str, value: object, *, lowest: int, highest: int) -> tuple[int, int]:
    """Return (smallest, largest), both inclusive, from a pair or from one number."""
    ends = (value, value) if isinstance(value, int) else value
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        wanted = "neither an integer nor a pair [smallest, largest]"
        raise ValueError(f"environment.parameters.{field}: {value!r} is {wanted}")
    smallest, largest = (parse_integer(field, end, lowest=lowest, highest=highest) for end in ends)
    if smallest > largest:
        fix = "put the smaller number of the pair first"
        raise ValueError(f"environment.parameters.{field}: {value!r} is empty; {fix}")
    return smallest, largest


def parse_path(value: object) -> str | None:
    """Return the path of a data set, or None."""
    if value is not None and (not isinstance(value, str) or not value):
        fix = "give a file or folder, or remove it to load from the hub"
        raise ValueError(f"environment.parameters.path: {value!r} is not a path; {fix}")
    return value
